from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAITING: _ClassVar[State]
    RUNNING: _ClassVar[State]
    FAILING: _ClassVar[State]
    STOPPED: _ClassVar[State]
    DONE: _ClassVar[State]
    LEAVING: _ClassVar[State]
WAITING: State
RUNNING: State
FAILING: State
STOPPED: State
DONE: State
LEAVING: State

class FromHost(_message.Message):
    __slots__ = ("host", "standing")
    HOST_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    host: Host
    standing: Standing
    def __init__(self, host: _Optional[_Union[Host, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class Host(_message.Message):
    __slots__ = ("run_id", "name", "incarnation", "address", "pid", "num_workers", "node_rank", "place", "versions", "terms")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    incarnation: str
    address: str
    pid: int
    num_workers: int
    node_rank: int
    place: Place
    versions: _containers.ScalarMap[str, str]
    terms: Terms
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., num_workers: _Optional[int] = ..., node_rank: _Optional[int] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., versions: _Optional[_Mapping[str, str]] = ..., terms: _Optional[_Union[Terms, _Mapping]] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("topology", "slice", "host", "coords", "num_chips", "hostnames")
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    COORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHIPS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAMES_FIELD_NUMBER: _ClassVar[int]
    topology: str
    slice: int
    host: int
    coords: _containers.RepeatedScalarFieldContainer[int]
    num_chips: int
    hostnames: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topology: _Optional[str] = ..., slice: _Optional[int] = ..., host: _Optional[int] = ..., coords: _Optional[_Iterable[int]] = ..., num_chips: _Optional[int] = ..., hostnames: _Optional[_Iterable[str]] = ...) -> None: ...

class Terms(_message.Message):
    __slots__ = ("min_hosts", "max_hosts", "max_restarts", "join_seconds", "last_call_seconds", "stop_seconds")
    MIN_HOSTS_FIELD_NUMBER: _ClassVar[int]
    MAX_HOSTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    JOIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_CALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STOP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    min_hosts: int
    max_hosts: int
    max_restarts: int
    join_seconds: float
    last_call_seconds: float
    stop_seconds: float
    def __init__(self, min_hosts: _Optional[int] = ..., max_hosts: _Optional[int] = ..., max_restarts: _Optional[int] = ..., join_seconds: _Optional[float] = ..., last_call_seconds: _Optional[float] = ..., stop_seconds: _Optional[float] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("state", "round", "rank", "num_hosts", "restarts", "failure", "store", "reason", "ends_run", "members")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_HOSTS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENDS_RUN_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    state: State
    round: int
    rank: int
    num_hosts: int
    restarts: int
    failure: Failure
    store: Store
    reason: str
    ends_run: bool
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, state: _Optional[_Union[State, str]] = ..., round: _Optional[int] = ..., rank: _Optional[int] = ..., num_hosts: _Optional[int] = ..., restarts: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., store: _Optional[_Union[Store, _Mapping]] = ..., reason: _Optional[str] = ..., ends_run: bool = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class Store(_message.Message):
    __slots__ = ("address", "port")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    address: str
    port: int
    def __init__(self, address: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("host", "is_host", "rank", "local_rank", "pid", "exit_code", "age_seconds", "ran_for_seconds", "message", "traceback")
    HOST_FIELD_NUMBER: _ClassVar[int]
    IS_HOST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RAN_FOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    host: str
    is_host: bool
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    age_seconds: float
    ran_for_seconds: float
    message: str
    traceback: str
    def __init__(self, host: _Optional[str] = ..., is_host: bool = ..., rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., age_seconds: _Optional[float] = ..., ran_for_seconds: _Optional[float] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class ToHost(_message.Message):
    __slots__ = ("assigned", "broken", "verdict", "waiting", "closed")
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    assigned: Assigned
    broken: Broken
    verdict: Verdict
    waiting: Waiting
    closed: Closed
    def __init__(self, assigned: _Optional[_Union[Assigned, _Mapping]] = ..., broken: _Optional[_Union[Broken, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ...) -> None: ...

class Assigned(_message.Message):
    __slots__ = ("round", "rank", "num_hosts", "first_worker", "num_workers", "restarts", "store", "addresses", "coordinator", "members")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_HOSTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    rank: int
    num_hosts: int
    first_worker: int
    num_workers: int
    restarts: int
    store: Store
    addresses: _containers.RepeatedScalarFieldContainer[str]
    coordinator: str
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., rank: _Optional[int] = ..., num_hosts: _Optional[int] = ..., first_worker: _Optional[int] = ..., num_workers: _Optional[int] = ..., restarts: _Optional[int] = ..., store: _Optional[_Union[Store, _Mapping]] = ..., addresses: _Optional[_Iterable[str]] = ..., coordinator: _Optional[str] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class Broken(_message.Message):
    __slots__ = ("round", "cause")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    round: int
    cause: str
    def __init__(self, round: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("round", "restarts", "failure", "cause", "max_restarts")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MAX_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    round: int
    restarts: int
    failure: Failure
    cause: str
    max_restarts: int
    def __init__(self, round: _Optional[int] = ..., restarts: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., cause: _Optional[str] = ..., max_restarts: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("here", "wanted", "missing")
    HERE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    here: int
    wanted: int
    missing: str
    def __init__(self, here: _Optional[int] = ..., wanted: _Optional[int] = ..., missing: _Optional[str] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("succeeded", "reason", "failure", "restarts")
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    succeeded: bool
    reason: str
    failure: Failure
    restarts: int
    def __init__(self, succeeded: bool = ..., reason: _Optional[str] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., restarts: _Optional[int] = ...) -> None: ...

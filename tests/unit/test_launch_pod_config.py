"""Where the hosts of a run meet, who each is, and what their workers are told of the TPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_hosts import vfio_host
from hypothesis import given
from hypothesis import strategies as st

from tpu_dist.errors import TpuDistError
from tpu_dist.launch.addresses import is_own_address, own_address
from tpu_dist.launch.config import LaunchConfig, build_config
from tpu_dist.launch.environment import read_environment
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.pod import PodConfig
from tpu_dist.launch.rendezvous import choose_rendezvous, listening_address, parse_endpoint
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.pod_run import TpuVariables
from tpu_dist.launch.settings import merge_settings
from tpu_dist.topology.chips import scan_devices

SLICE = {
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "TPU_WORKER_HOSTNAMES": "vm-0,vm-1",
    "TPU_SKIP_MDS_QUERY": "1",
}
TWO_SLICES = {
    **SLICE,
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "job-slice-0-0.job:8080",
}


def pod_of(environ: dict[str, str], root: Path, **arguments: str) -> PodConfig | None:
    environment = read_environment(environ)
    given = {name.replace("_", "-"): text for name, text in arguments.items()}
    settings = merge_settings(given, environment.settings)
    return choose_rendezvous(settings, environment, scan_devices(root), root=root)


@pytest.fixture
def v5p(tmp_path: Path) -> Path:
    vfio_host(tmp_path, "0x0062", chips=4, nodes=4)
    return tmp_path


@pytest.mark.parametrize("worker", [0, 1])
def test_the_first_host_of_the_slice_is_elected_without_a_word(v5p: Path, worker: int) -> None:
    pod = pod_of({**SLICE, "TPU_WORKER_ID": str(worker)}, v5p)
    assert pod is not None
    assert (str(pod.endpoint), pod.endpoint.is_here) == ("vm-0:8471", worker == 0)
    assert pod.endpoint.origin == "TPU_WORKER_HOSTNAMES=vm-0,vm-1"
    assert (pod.min_hosts, pod.max_hosts, pod.address) == (2, 2, f"vm-{worker}")
    assert pod.place is not None and pod.place.host == worker


@pytest.mark.parametrize(
    ("index", "worker", "is_here"), [(0, 0, True), (0, 1, False), (1, 0, False)]
)
def test_the_first_host_of_the_first_slice_is_elected_for_several(
    v5p: Path, index: int, worker: int, is_here: bool
) -> None:
    where = {"MEGASCALE_SLICE_ID": str(index), "TPU_WORKER_ID": str(worker)}
    pod = pod_of(TWO_SLICES | where, v5p)
    assert pod is not None
    assert (str(pod.endpoint), pod.endpoint.is_here) == ("job-slice-0-0.job:8471", is_here)
    assert pod.max_hosts == 4


def test_one_host_has_nobody_to_find(v5p: Path, tmp_path: Path) -> None:
    assert pod_of({"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5p-8"}, v5p) is None
    assert pod_of({**SLICE, "TPU_WORKER_ID": "1"}, v5p, standalone="1") is None
    assert pod_of({}, tmp_path / "nothing") is None


def test_all_hosts_of_a_slice_take_part(v5p: Path) -> None:
    with pytest.raises(LaunchError, match="--nnodes 3: v5p:2x2x2 has 2 hosts, and all of them"):
        pod_of({**SLICE, "TPU_WORKER_ID": "0"}, v5p, nnodes="3")
    with pytest.raises(LaunchError, match="--nnodes 1:2: v5p:2x2x2 has 2 hosts"):
        pod_of({**SLICE, "TPU_WORKER_ID": "0"}, v5p, nnodes="1:2")


def test_on_a_slice_of_several_hosts_every_device_gets_a_worker(v5p: Path) -> None:
    config = config_of({**SLICE, "TPU_WORKER_ID": "1"}, v5p)
    assert (config.num_workers, config.sets_tpu, config.run_id) == (4, True, "none")
    assert config_of({**SLICE, "TPU_WORKER_ID": "1", "JOBSET_NAME": "vm"}, v5p).run_id == "vm"


def config_of(environ: dict[str, str], root: Path) -> LaunchConfig:
    script = root / "train.py"
    script.touch()
    return build_config({}, str(script), (), read_environment(environ), root=root, num_cores=8)


def test_workers_are_told_what_the_hosts_agreed_on_and_not_what_was_left_over(
    v5p: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = {
        "TPU_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_ADDRESSES": "localhost:8476",
        "MEGASCALE_NUM_SLICES": "4",
        "TPU_WORKER_ID": "1",
    }
    for name, text in stale.items():
        monkeypatch.setenv(name, text)
    variables = TpuVariables(config_of({**SLICE, "TPU_WORKER_ID": "1"}, v5p))
    assert set(stale) <= set(variables.stale)
    for round_number, addresses in ((1, ["10.0.0.7", "10.0.0.8"]), (2, ["10.0.0.9", "10.0.0.8"])):
        assigned = pb.Assigned(round=round_number, rank=1, num_hosts=2, addresses=addresses)
        for local_rank in range(4):
            told = variables.of(assigned, local_rank)
            assert told["TPU_PROCESS_BOUNDS"] == "2,2,2"
            assert told["CLOUD_TPU_TASK_ID"] == str(4 + local_rank)
            assert told["TPU_WORKER_HOSTNAMES"] == ",".join(addresses)
            assert told["TPU_PROCESS_ADDRESSES"].split(",")[4 + local_rank] == (
                f"10.0.0.8:{8476 + local_rank}"
            )
            assert told["TPU_PROCESS_ADDRESSES"].startswith(f"{addresses[0]}:8476,")
    logged = capsys.readouterr().err
    assert logged.count("TPU_PROCESS_BOUNDS=2,2,1 is in the environment; workers get 2,2,2") == 1
    assert "MEGASCALE_NUM_SLICES=4 is in the environment; left out" in logged
    assert "TPU_WORKER_ID" not in logged  # it said the same


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("vm-0", ("vm-0", 8471)),
        ("vm-0.pool.svc:99", ("vm-0.pool.svc", 99)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[fd00::1]:99", ("fd00::1", 99)),
    ],
)
def test_endpoints(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text, "--rdzv-endpoint") == endpoint


@pytest.mark.parametrize("text", ["", ":1", "a:0", "a:65536", "a:b", "a b", "fd00::1", "a:1:2"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(LaunchError, match="expected HOST:PORT"):
        parse_endpoint(text, "--rdzv-endpoint")


def test_torchruns_words_for_a_fixed_master_are_an_endpoint(tmp_path: Path) -> None:
    given = {"master_addr": "127.0.0.1", "master_port": "29500", "node_rank": "1", "nnodes": "2"}
    pod = pod_of({}, tmp_path, **given, node_name="b", rdzv_backend="static")
    assert pod is not None
    assert (str(pod.endpoint), pod.endpoint.is_here) == ("127.0.0.1:29500", True)
    assert (pod.node_rank, pod.name, pod.address) == (1, "b", "127.0.0.1")
    assert listening_address(pod.endpoint) == "127.0.0.1"


def test_this_machine_knows_its_own_addresses() -> None:
    assert is_own_address("127.0.0.1") and is_own_address("localhost")
    assert not is_own_address("192.0.2.1")
    assert not is_own_address("no-such-host.invalid")
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no-such-host.invalid") in (None, own_address("192.0.2.1"))


def test_a_name_of_this_machine_that_means_loopback_only_here_is_not_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in Debian's /etc/hosts: 127.0.1.1 vm-0.
    def resolve(host: str, *_: object, **__: object) -> list[object]:
        address = {"vm-0": "127.0.1.1"}.get(host, host)
        return [] if ":" in address else [(2, 1, 6, "", (address, 0))]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    assert own_address("vm-0") != "127.0.1.1"
    assert own_address("127.0.0.1") == "127.0.0.1"


NAMES = [
    *SLICE,
    *TWO_SLICES,
    *("TPU_WORKER_ID", "MEGASCALE_SLICE_ID", "JOBSET_NAME", "JOB_COMPLETION_INDEX"),
    *("TPU_LAUNCH_NNODES", "TPU_LAUNCH_RDZV_ENDPOINT", "TPU_LAUNCH_NODE_RANK"),
    *("TPU_LAUNCH_RDZV_CONF", "TPU_LAUNCH_NODE_NAME", "TPU_LAUNCH_MASTER_ADDR"),
]
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["0", "1", "2", "1:2", "vm-0", "127.0.0.1:1", "a,b", "v5p-16", "auto"]),
)


@given(st.dictionaries(st.sampled_from(NAMES), TEXTS))
def test_any_environment_is_a_pod_or_an_error_of_ours(environ: dict[str, str]) -> None:
    # No name is looked up: a resolver may take its time.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpu_dist.launch.addresses._resolve", lambda host: [])
        try:
            pod = pod_of(environ | {"TPU_SKIP_MDS_QUERY": "1"}, Path("/nowhere"))
        except TpuDistError as error:
            assert str(error)
        else:
            assert pod is None or 1 <= pod.min_hosts <= pod.max_hosts

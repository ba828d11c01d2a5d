"""Where a host is: what every source says, how they agree, and what is caught."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
from fake_hosts import accel_host, metadata_server, vfio_host
from hypothesis import given
from hypothesis import strategies as st

from tpu_dist.topology.discovery import Place, describe_arguments, discover
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.source_metadata import MetadataServer

ALONE = {"TPU_SKIP_MDS_QUERY": "1"}
NOWHERE = Path("/nowhere")

# As GKE sets them on the third of four hosts.
GKE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-16",
    "TPU_TOPOLOGY": "4x4",
    "TPU_TOPOLOGY_WRAP": "false,false,false",
    "TPU_HOST_BOUNDS": "2,2,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_WORKER_ID": "2",
    "TPU_WORKER_HOSTNAMES": "job-w-0-0.job,job-w-0-1.job,job-w-0-2.job,job-w-0-3.job",
}

# A v4-256's, as dumped on such a host; one of 32.
TPU_ENV = """\
ACCELERATOR_TYPE: 'v4-256'
CHIPS_PER_HOST_BOUNDS: '2,2,1'
HOST_BOUNDS: '2,2,8'
TOPOLOGY: '4x4x8'
WRAP: 'true,true,true'
WORKER_ID: '5'
ZONE: 'us-central2-b'
ENABLE_ICI_RESILIENCY: 'false'
"""
V4_256 = {
    "accelerator-type": "v4-256",
    "agent-worker-number": "5",
    "tpu-env": TPU_ENV,
    "worker-network-endpoints": ",".join(f"t1v-{i}:uid-{i}:10.0.0.{i}" for i in range(32)),
}


def found(environ: Mapping[str, str], root: Path = NOWHERE, own_name: str = "elsewhere") -> Place:
    return discover(environ, root=root, own_name=own_name)


def asked(address: str, environ: Mapping[str, str] | None = None, root: Path = NOWHERE) -> Place:
    server = MetadataServer(address=address, timeout=timedelta(seconds=2))
    return discover(environ or {}, root=root, metadata=server, own_name="elsewhere")


def test_arguments_alone_say_it() -> None:
    arguments = describe_arguments("v5p:4x4x8*2", host=7, slice_index=1)
    place = discover(ALONE, arguments=arguments, root=NOWHERE)
    assert str(place.system) == "v5p:4x4x8*2"
    assert (place.slice_index, place.host, place.hostnames) == (1, 7, ())
    assert place.origins["shape"] == "the argument topology='v5p:4x4x8*2'"


def test_the_environment_of_gke_says_it() -> None:
    place = found(GKE)
    assert str(place.system) == "v6e:4x4"
    assert (place.host, place.system.num_hosts) == (2, 4)
    assert place.hostnames[2] == "job-w-0-2.job"
    assert place.origins["host"] == "TPU_WORKER_ID=2"


@pytest.mark.parametrize(
    ("environ", "slice_", "host"),
    [
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, "v5e:2x4", 0),
        ({"TPU_ACCELERATOR_TYPE": "tpu7x-8"}, "tpu7x:2x2x1", 0),
        ({"TPU_ACCELERATOR_TYPE": "v4-16", "CLOUD_TPU_TASK_ID": "1"}, "v4:2x2x2", 1),
        # Set for the processes of one chip each: the host's index is to be told from theirs.
        (
            {
                "TPU_ACCELERATOR_TYPE": "v4-16",
                "TPU_PROCESS_BOUNDS": "2,2,2",
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "CLOUD_TPU_TASK_ID": "6",
            },
            "v4:2x2x2",
            1,
        ),
        (
            {
                "TPU_ACCELERATOR_TYPE": "tpu7x-16",
                "TPU_PROCESS_BOUNDS": "2,2,2,2",
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "CLOUD_TPU_TASK_ID": "7",
            },
            "tpu7x:2x2x2",
            0,
        ),
        (
            {"TPU_ACCELERATOR_TYPE": "v5p-512", "TPU_TOPOLOGY": "4x4x16", "TPU_WORKER_ID": "63"},
            "v5p:4x4x16",
            63,
        ),
        (
            {
                "TPU_ACCELERATOR_TYPE": "v4-256",
                "TPU_TOPOLOGY": "4x4x8_twisted",
                "TPU_WORKER_ID": "0",
            },
            "v4:4x4x8_twisted",
            0,
        ),
        (
            {
                "TPU_ACCELERATOR_TYPE": "v5litepod-32",
                "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
                "TPU_WORKER_ID": "3",
            },
            "v5e:4x8",
            3,
        ),
        # TPU_PROCESS_ADDRESSES has each host once a process.
        (
            {
                "TPU_ACCELERATOR_TYPE": "v4-16",
                "TPU_PROCESS_ADDRESSES": "a:8476,a:8477,a:8478,a:8479,b:8476,b:8477,b:8478,b:8479",
                "TPU_WORKER_HOSTNAMES": "a,b",
                "TPU_WORKER_ID": "1",
            },
            "v4:2x2x2",
            1,
        ),
        # An Indexed Job of jobs of one host each counts jobs, not hosts.
        ({"TPU_ACCELERATOR_TYPE": "v6e-8", "JOB_COMPLETION_INDEX": "5"}, "v6e:2x4", 0),
        ({"TPU_ACCELERATOR_TYPE": "v6e-16", "JOB_COMPLETION_INDEX": "3"}, "v6e:4x4", 3),
        # "localhost" is the word for no list at all.
        ({"TPU_ACCELERATOR_TYPE": "v6e-8", "TPU_WORKER_HOSTNAMES": "localhost"}, "v6e:2x4", 0),
    ],
    ids=str,
)
def test_variables_of_every_kind_are_understood(
    environ: dict[str, str], slice_: str, host: int
) -> None:
    place = found(ALONE | environ)
    assert (str(place.system), place.host) == (slice_, host)


def test_hosts_of_eight_chips_are_counted_as_such() -> None:
    environ = {"TPU_ACCELERATOR_TYPE": "v5litepod-32", "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1"}
    place = found(ALONE | environ | {"TPU_WORKER_ID": "3"})
    assert place.system.num_hosts == 4
    with pytest.raises(TopologyError, match="this is host 4 .*has 4"):
        found(ALONE | environ | {"TPU_WORKER_ID": "4"})


def test_several_slices_are_found() -> None:
    several = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "job-w-0-0.job:8081",
    }
    hosts = {"TPU_WORKER_HOSTNAMES": GKE["TPU_WORKER_HOSTNAMES"].replace("w-0", "w-1")}
    place = found(GKE | several | hosts)
    assert (str(place.system), place.slice_index) == ("v6e:4x4*2", 1)
    assert place.coordinator == "job-w-0-0.job:8081"
    with pytest.raises(TopologyError, match="nothing says which one this host is in"):
        found(GKE | {"MEGASCALE_NUM_SLICES": "2"})
    with pytest.raises(TopologyError, match="slice 1 by MEGASCALE_SLICE_ID=1, but .* only 1"):
        found(GKE | {"MEGASCALE_SLICE_ID": "1"})
    with pytest.raises(TopologyError, match="MEGASCALE_NUM_SLICES=0: a job has at least one"):
        found(GKE | {"MEGASCALE_NUM_SLICES": "0"})


def test_a_jobset_names_the_coordinator_of_its_slices() -> None:
    jobset = {"JOBSET_NAME": "job", "REPLICATED_JOB_NAME": "w", "JOB_COMPLETION_INDEX": "2"}
    several = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"}
    assert found(GKE | jobset | several).coordinator == "job-w-0-0.job"
    assert found(GKE | jobset).coordinator is None


def test_this_host_is_found_by_its_name_among_the_others() -> None:
    environ = {name: text for name, text in GKE.items() if name != "TPU_WORKER_ID"}
    assert found(environ, own_name="job-w-0-3").host == 3
    with pytest.raises(TopologyError, match="nothing says which one this is. Set TPU_WORKER_ID"):
        found(environ)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"TPU_ACCELERATOR_TYPE": "v6e-32"}, "TPU_TOPOLOGY=4x4, and 4x8x1 by TPU_ACCELERATOR"),
        ({"TPU_ACCELERATOR_TYPE": "v5p-16"}, "4x4x1 by TPU_TOPOLOGY=4x4, and 2x2x2"),
        (
            {"TPU_HOST_BOUNDS": "2,4,1"},
            "TPU_TOPOLOGY=4x4, and 4x8x1 by TPU_HOST_BOUNDS=2,4,1 times",
        ),
        ({"TPU_TOPOLOGY": "2x2"}, "2x2x1 by TPU_TOPOLOGY=2x2, and 4x4x1 by"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "lists 2 hosts, but v6e:4x4 .* has 4 of 4 chips"),
        ({"TPU_WORKER_HOSTNAMES": "other"}, "lists 1 hosts, but v6e:4x4"),
        ({"TPU_WORKER_ID": "4"}, "this is host 4 by TPU_WORKER_ID=4, but v6e:4x4 has 4"),
        ({"JOB_COMPLETION_INDEX": "1"}, "2 by TPU_WORKER_ID=2, and 1 by JOB_COMPLETION_INDEX=1"),
        ({"JOBSET_NAME": "mine"}, "hosts are those of another job.*'job-w-0-0'.*JOBSET_NAME=mine"),
        (
            {"TPU_PROCESS_ADDRESSES": "x:1,y:1,z:1,w:1"},
            "list of hosts is job-w-0-0.job,.* by TPU_WORKER_HOSTNAMES.*and x,y,z,w by",
        ),
        (
            {"CLOUD_TPU_TASK_ID": "1"},
            "index of this host is 2 by TPU_WORKER_ID=2, and 1 by CLOUD_TPU_TASK_ID=1",
        ),
        ({"CLOUD_TPU_TASK_ID": "17"}, "CLOUD_TPU_TASK_ID=17 is a process of 4"),
        (
            {
                "JOBSET_NAME": "job",
                "REPLICATED_JOB_NAME": "w",
                "MEGASCALE_NUM_SLICES": "2",
                "MEGASCALE_SLICE_ID": "1",
            },
            "index of this slice is 1 by MEGASCALE_SLICE_ID=1, and 0 by TPU_WORKER_HOSTNAMES",
        ),
        (
            {
                "JOBSET_NAME": "job",
                "TPU_WORKER_HOSTNAMES": "job-w-0-0,job-w-0-1,job-w-1-0,job-w-1-1",
            },
            r"hosts of several slices \(0, 1\)",
        ),
    ],
    ids=str,
)
def test_what_is_left_over_or_foreign_is_caught(change: dict[str, str], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        found(GKE | change)


def test_an_index_that_is_another_host_s_is_caught() -> None:
    with pytest.raises(TopologyError, match="2 by TPU_WORKER_ID=2, and 1 by this host's name"):
        found(GKE, own_name="job-w-0-1")


def test_a_single_host_s_shape_in_a_job_of_four_is_caught() -> None:
    environ = {
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "TPU_TOPOLOGY": "2x2",
        "TPU_WORKER_HOSTNAMES": "a,b,c,d",
        "TPU_WORKER_ID": "0",
    }
    with pytest.raises(TopologyError, match="describes a single host"):
        found(ALONE | environ)


@pytest.mark.parametrize(
    "name",
    [
        "TPU_ACCELERATOR_TYPE",
        "TPU_TOPOLOGY",
        "TPU_TOPOLOGY_WRAP",
        "TPU_HOST_BOUNDS",
        "TPU_CHIPS_PER_HOST_BOUNDS",
        "TPU_PROCESS_BOUNDS",
        "TPU_WORKER_ID",
        "CLOUD_TPU_TASK_ID",
        "TPU_WORKER_HOSTNAMES",
        "TPU_PROCESS_ADDRESSES",
        "MEGASCALE_NUM_SLICES",
        "MEGASCALE_SLICE_ID",
        "MEGASCALE_COORDINATOR_ADDRESS",
        "JOB_COMPLETION_INDEX",
    ],
)
def test_garbage_is_an_error_that_names_it(name: str) -> None:
    for garbage in ("?!", "a b", "1;2", "-1", "\N{SNOWMAN},", "9" * 400):
        with pytest.raises(TopologyError) as caught:
            found(GKE | {name: garbage})
        assert garbage[:100] in str(caught.value)
    assert found(GKE | {name: ""} if name not in GKE else GKE).host == 2


@given(st.dictionaries(st.sampled_from([*GKE, "TPU_PROCESS_BOUNDS"]), st.text(max_size=12)))
def test_no_text_in_the_environment_breaks_it(environ: dict[str, str]) -> None:
    try:
        found(GKE | environ | ALONE)
    except TopologyError:
        pass


def v5e(root: Path) -> None:
    vfio_host(root, "0x0063", chips=8, nodes=8)


def half_a_v5e(root: Path) -> None:
    vfio_host(root, "0x0063", chips=8, nodes=4)


def v3(root: Path) -> None:
    accel_host(root, "0x0027", "0x004f", chips=4)


def tpu7x(root: Path) -> None:
    vfio_host(root, "0x0076", chips=4, nodes=4, functions=2)


@pytest.mark.parametrize(
    ("host", "slice_", "devices"),
    [(v5e, "v5e:2x4", 8), (half_a_v5e, "v5e:2x2", 4), (v3, "v3:2x2", 8), (tpu7x, "tpu7x:2x2x1", 8)],
)
def test_a_host_alone_is_what_its_bus_shows(
    tmp_path: Path, host: Callable[[Path], None], slice_: str, devices: int
) -> None:
    host(tmp_path)
    place = found(ALONE, tmp_path)
    assert (str(place.system), place.system.num_devices) == (slice_, devices)


def test_the_bus_and_the_environment_must_agree(tmp_path: Path) -> None:
    v5e(tmp_path)
    eight = ALONE | {"TPU_ACCELERATOR_TYPE": "v5litepod-16", "TPU_WORKER_ID": "1"}
    assert found(eight, tmp_path).system.num_hosts == 2
    with pytest.raises(TopologyError, match="v6e by TPU_ACCELERATOR_TYPE=v6e-16, and v5e by"):
        found(GKE, tmp_path)
    with pytest.raises(TopologyError, match="8 by 8 chips in /dev|4 by TPU_CHIPS.*8 by 8 chips"):
        found(eight | {"TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}, tmp_path)


def test_chips_that_cannot_be_used_are_an_error(tmp_path: Path) -> None:
    vfio_host(tmp_path, "0x0062", chips=4, nodes=0)
    with pytest.raises(TopologyError, match="4 v5p chips on its PCI bus, and none of their files"):
        found(ALONE, tmp_path)
    unknown = tmp_path / "unknown"
    vfio_host(unknown, "0x007c", chips=4, nodes=4)
    with pytest.raises(TopologyError, match="4 tpu8t chips.*supported are v2"):
        found(ALONE, unknown)


def test_nothing_at_all_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(TopologyError, match="nothing says which TPU this is.*TPU_ACCELERATOR_TYPE"):
        found(ALONE)
    with pytest.raises(TopologyError, match="may be 4x8x8, 4x4x16. Set TPU_TOPOLOGY"):
        found(ALONE | {"TPU_ACCELERATOR_TYPE": "v5p-512"})


def test_a_tpu_vm_learns_it_from_the_metadata_server(tmp_path: Path) -> None:
    accel_host(tmp_path, "0x005e", "0x0000", chips=4)
    with metadata_server(V4_256) as address:
        place = asked(address, root=tmp_path)
        through_environment = discover(
            {"GCE_METADATA_IP": address}, root=tmp_path, own_name="elsewhere"
        )
    assert str(place.system) == "v4:4x4x8"
    assert (place.host, place.system.slice.host_bounds) == (5, (2, 2, 8))
    assert place.system.slice.wrap == (True, True, True)
    assert place.hostnames[5] == "10.0.0.5"
    assert place.origins["hostnames"].startswith("metadata worker-network-endpoints")
    assert through_environment == place


def test_the_metadata_server_s_newer_list_of_plain_names_is_understood() -> None:
    names = ",".join(f"host-{i}" for i in range(32))
    with metadata_server(V4_256 | {"worker-network-endpoints": names}) as address:
        assert asked(address).hostnames[31] == "host-31"


def test_a_machine_elsewhere_and_a_server_that_is_not_google_s_say_nothing(tmp_path: Path) -> None:
    v5e(tmp_path)
    assert str(asked("127.0.0.1:1", root=tmp_path).system) == "v5e:2x4"
    for flavor in (None, "Other"):
        with metadata_server(V4_256, flavor=flavor) as address:
            assert str(asked(address, root=tmp_path).system) == "v5e:2x4"
    with metadata_server({}) as address:
        assert str(asked(address, root=tmp_path).system) == "v5e:2x4"


def test_the_metadata_server_may_fail_for_a_while() -> None:
    with metadata_server(V4_256, failures=3) as address:
        assert asked(address).host == 5
    with metadata_server(V4_256, failures=10**6) as address:
        server = MetadataServer(address=address, timeout=timedelta(seconds=0.3))
        with pytest.raises(TopologyError, match="did not tell .* within 0.3 s .last status: 503"):
            discover({}, root=NOWHERE, metadata=server)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("tpu-env", "<html>no</html>", "tpu-env cannot be read"),
        ("tpu-env", "HOST_BOUNDS: 'two'", "metadata tpu-env HOST_BOUNDS=two"),
        ("tpu-env", b"\xff\xfe", "tpu-env is no text"),
        ("agent-worker-number", "first", "metadata agent-worker-number=first"),
        ("agent-worker-number", "6", "metadata agent-worker-number=6, and 5 by metadata tpu-env"),
        ("worker-network-endpoints", "a:b", "metadata worker-network-endpoints=a:b"),
        ("accelerator-type", "v4", "metadata accelerator-type=v4"),
    ],
)
def test_what_the_metadata_server_garbles_is_an_error(
    key: str, text: str | bytes, said: str
) -> None:
    with metadata_server({**V4_256, key: text}) as address:
        with pytest.raises(TopologyError, match=said):
            asked(address)


def test_the_environment_and_the_metadata_server_must_agree() -> None:
    stale = {"TPU_WORKER_ID": "3"}
    with metadata_server(V4_256) as address:
        with pytest.raises(TopologyError, match="3 by TPU_WORKER_ID=3, and 5 by metadata agent"):
            asked(address, stale)
        skipped = stale | ALONE | {"TPU_ACCELERATOR_TYPE": "v4-256", "GCE_METADATA_IP": address}
        assert found(skipped).host == 3
    with pytest.raises(TopologyError, match="GCE_METADATA_IP and GCE_METADATA_HOST"):
        discover({"GCE_METADATA_IP": "host:port"}, root=NOWHERE)

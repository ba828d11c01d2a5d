"""What libtpu is told, against the vectors of torch_xla and JAX's bounds table."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_hosts import accel_host, vfio_host

from tpu_dist.errors import BringUpError, TopologyError
from tpu_dist.runtime.client import prepare_tpu
from tpu_dist.runtime.environment import RuntimeConfig
from tpu_dist.topology.coordinates import HostId
from tpu_dist.topology.discovery import Place, discover
from tpu_dist.topology.system import System
from tpu_dist.topology.tpu_environment import AMBIENT, host_environment, tpu_environment

ALONE = {"TPU_SKIP_MDS_QUERY": "1"}
NOWHERE = Path("/nowhere")


def place(environ: Mapping[str, str], root: Path = NOWHERE) -> Place:
    return discover(ALONE | dict(environ), root=root, own_name="elsewhere")


def v4_16(root: Path, worker: int) -> Place:
    """Two hosts of four chips: torch_xla's test_internal_tpu.py."""
    if not root.joinpath("sys").exists():
        accel_host(root, "0x005e", "0x0000", chips=4)
    return place(
        {
            "TPU_WORKER_HOSTNAMES": "worker0,worker1",
            "TPU_HOST_BOUNDS": "1,1,2",
            "TPU_WORKER_ID": str(worker),
        },
        root,
    )


def test_v4_16_worker_1_process_0(tmp_path: Path) -> None:
    variables = tpu_environment(v4_16(tmp_path, 1), local_rank=0, local_world_size=4)
    assert variables == {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "2,2,2",
        "TPU_PROCESS_ADDRESSES": (
            "worker0:8476,worker0:8477,worker0:8478,worker0:8479,"
            "worker1:8476,worker1:8477,worker1:8478,worker1:8479"
        ),
        "TPU_PROCESS_PORT": "8476",
        "CLOUD_TPU_TASK_ID": "4",
        "TPU_VISIBLE_CHIPS": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def test_v4_8_process_3(tmp_path: Path) -> None:
    accel_host(tmp_path, "0x005e", "0x0000", chips=4)
    variables = tpu_environment(place({}, tmp_path), local_rank=3, local_world_size=4)
    assert variables["TPU_PROCESS_BOUNDS"] == "2,2,1"
    assert variables["CLOUD_TPU_TASK_ID"] == "3"
    assert variables["TPU_PROCESS_PORT"] == "8479"
    assert variables["TPU_VISIBLE_CHIPS"] == "3"
    assert variables["TPU_PROCESS_ADDRESSES"] == ",".join(
        f"localhost:{p}" for p in range(8476, 8480)
    )


@pytest.mark.parametrize("chips, bounds", [(1, "1,1,1"), (2, "1,2,1"), (4, "2,2,1"), (8, "2,4,1")])
def test_the_processes_of_one_host_stand_as_its_chips_do(
    tmp_path: Path, chips: int, bounds: str
) -> None:
    vfio_host(tmp_path, "0x006f", chips=chips, nodes=chips)
    for local_rank in range(chips):
        variables = tpu_environment(
            place({}, tmp_path), local_rank=local_rank, local_world_size=chips
        )
        assert variables["TPU_PROCESS_BOUNDS"] == bounds
        assert variables["TPU_VISIBLE_CHIPS"] == str(local_rank)


def test_two_devices_a_chip_add_a_fourth_bound(tmp_path: Path) -> None:
    vfio_host(tmp_path, "0x0076", chips=4, nodes=4, functions=2)
    variables = tpu_environment(place({}, tmp_path), local_rank=7, local_world_size=8)
    assert variables["TPU_PROCESS_BOUNDS"] == "2,2,1,2"
    assert variables["CLOUD_TPU_TASK_ID"] == "7"


def test_v4_256_has_every_process_once() -> None:
    hostnames = [f"host{i}" for i in range(32)]
    tasks, ports = [], set()
    for worker in range(32):
        here = place(
            {
                "TPU_ACCELERATOR_TYPE": "v4-256",
                "TPU_WORKER_HOSTNAMES": ",".join(hostnames),
                "TPU_HOST_BOUNDS": "2,2,8",
                "TPU_WORKER_ID": str(worker),
            }
        )
        for local_rank in range(4):
            variables = tpu_environment(here, local_rank=local_rank, local_world_size=4)
            task = int(variables["CLOUD_TPU_TASK_ID"])
            address = variables["TPU_PROCESS_ADDRESSES"].split(",")[task]
            assert address == f"host{worker}:{variables['TPU_PROCESS_PORT']}"
            assert variables["TPU_PROCESS_BOUNDS"] == "4,4,8"
            tasks.append(task)
            ports.add(variables["TPU_PROCESS_PORT"])
    assert tasks == list(range(128)) and len(ports) == 4


def test_hosts_of_eight_chips_make_the_slice(tmp_path: Path) -> None:
    vfio_host(tmp_path, "0x0063", chips=8, nodes=8)
    here = place(
        {
            "TPU_ACCELERATOR_TYPE": "v5litepod-16",
            "TPU_WORKER_HOSTNAMES": "a,b",
            "TPU_WORKER_ID": "1",
        },
        tmp_path,
    )
    variables = tpu_environment(here, local_rank=7, local_world_size=8)
    assert variables["TPU_PROCESS_BOUNDS"] == "4,4,1"
    assert variables["CLOUD_TPU_TASK_ID"] == "15"


@pytest.mark.parametrize("worker", [0, 1])
def test_what_was_set_for_libtpu_says_the_same_when_it_is_read_again(
    tmp_path: Path, worker: int
) -> None:
    """A second init_process_group, and a child of the process, find the first one's variables."""
    here = v4_16(tmp_path, worker)
    for local_rank in range(4):
        variables = tpu_environment(here, local_rank=local_rank, local_world_size=4)
        again = place(
            {"TPU_HOST_BOUNDS": "1,1,2", "TPU_WORKER_ID": str(worker)} | variables, tmp_path
        )
        assert (again.system, again.host, again.hostnames) == (
            here.system,
            here.host,
            here.hostnames,
        )
        assert tpu_environment(again, local_rank=local_rank, local_world_size=4) == variables


@pytest.mark.parametrize(
    ("topology", "chips_per_host", "bounds"),
    [
        ("v4:2x2x2*2", None, "2,2,2"),
        ("v5e:4x8*3", 8, "4,8,1"),
        ("v6e:2x4*2", 8, "2,4,1"),
        ("v5p:4x4x4*4", None, "4,4,4"),
        ("tpu7x:2x2x4*2", None, "2,2,4,2"),
        ("v3:4x4*2", None, "4,4,1,2"),
    ],
)
def test_each_slice_of_several_has_all_its_processes_and_all_find_the_coordinator(
    tmp_path: Path, topology: str, chips_per_host: int | None, bounds: str
) -> None:
    system = System.parse(topology, chips_per_host=chips_per_host)
    slice_, workers = system.slice, system.slice.devices_per_host
    if chips_per_host is not None:  # which only the hardware says
        vfio_host(tmp_path, EIGHT_CHIPS[slice_.generation.name], chips=8, nodes=8)
    for index in range(system.num_slices):
        names = tuple(f"slice{index}-host{host}" for host in range(slice_.num_hosts))
        tasks = []
        for host in range(slice_.num_hosts):
            here = Place(
                system=system,
                slice_index=index,
                host=HostId(host),
                hostnames=names,
                coordinator="slice0-host0",
                origins={},
            )
            for local_rank in range(workers):
                variables = tpu_environment(
                    here, local_rank=local_rank, local_world_size=workers
                ) | host_environment(here)
                assert variables["TPU_PROCESS_BOUNDS"] == bounds
                task = int(variables["CLOUD_TPU_TASK_ID"])
                addresses = variables["TPU_PROCESS_ADDRESSES"].split(",")
                assert len(addresses) == slice_.num_devices
                assert addresses[task] == f"{names[host]}:{variables['TPU_PROCESS_PORT']}"
                assert variables["MEGASCALE_COORDINATOR_ADDRESS"] == "slice0-host0"
                assert variables["MEGASCALE_NUM_SLICES"] == str(system.num_slices)
                assert variables["MEGASCALE_SLICE_ID"] == str(index)
                assert variables["MEGASCALE_PORT"] == str(8081 + local_rank)
                assert set(variables) <= AMBIENT | {"ALLOW_MULTIPLE_LIBTPU_LOAD"}
                tasks.append(task)
                # A worker that finds out for itself comes to the same.
                again = place(variables | {"TPU_ACCELERATOR_TYPE": type_of(system)}, tmp_path)
                assert (again.host, again.slice_index) == (host, index)
                assert again.hostnames == (names if slice_.num_hosts > 1 else names[:1])
        assert tasks == list(range(slice_.num_devices))


EIGHT_CHIPS = {"v5e": "0x0063", "v6e": "0x006f"}  # PCI devices


def type_of(system: System) -> str:
    generation = system.slice.generation
    name = {"v5e": "v5litepod"}.get(generation.name, generation.name)
    return f"{name}-{system.slice.num_chips * generation.cores_per_chip_in_names}"


def test_several_slices_need_to_know_who_joins_them() -> None:
    here = Place(system=System.parse("v6e:2x4*2", chips_per_host=8), origins={})
    with pytest.raises(TopologyError, match="Set MEGASCALE_COORDINATOR_ADDRESS"):
        tpu_environment(here, local_rank=0, local_world_size=8)


def test_an_address_of_ipv6_is_written_so_that_a_port_can_follow(tmp_path: Path) -> None:
    here = replace(v4_16(tmp_path, 0), hostnames=("fd00::1", "[fd00::2]"))
    variables = tpu_environment(here, local_rank=0, local_world_size=4)
    assert variables["TPU_PROCESS_ADDRESSES"].startswith("[fd00::1]:8476,[fd00::1]:8477,")
    assert "[fd00::2]:8476" in variables["TPU_PROCESS_ADDRESSES"]


@pytest.mark.parametrize(
    ("environ", "call", "said"),
    [
        ({}, {"local_rank": 0, "local_world_size": 1}, "4 TPU devices, and 1"),
        ({}, {"local_rank": 0, "local_world_size": 8}, "4 TPU devices, and 8"),
        ({}, {"local_rank": 4, "local_world_size": 4}, "LOCAL_RANK is 4"),
        ({}, {"local_rank": -1, "local_world_size": 4}, "LOCAL_RANK is -1"),
        (
            {"TPU_ACCELERATOR_TYPE": "v4-16", "TPU_WORKER_ID": "1"},
            {"local_rank": 0, "local_world_size": 4},
            "2 hosts, and nothing says where they are. Set TPU_WORKER_HOSTNAMES",
        ),
    ],
    ids=str,
)
def test_a_host_that_cannot_be_served_is_refused(
    tmp_path: Path, environ: dict[str, str], call: dict[str, Any], said: str
) -> None:
    accel_host(tmp_path, "0x005e", "0x0000", chips=4)
    with pytest.raises(TopologyError, match=said):
        tpu_environment(place(environ, tmp_path), **call)


def test_an_odd_number_of_chips_is_refused(tmp_path: Path) -> None:
    vfio_host(tmp_path, "0x0063", chips=8, nodes=6)
    with pytest.raises(TopologyError, match="6 chips is not known; known are 1, 2, 4, 8"):
        place({}, tmp_path)


def test_a_process_is_prepared_from_what_its_host_has(tmp_path: Path) -> None:
    config = RuntimeConfig(platform="tpu", local_rank=5, local_world_size=8)
    with pytest.raises(BringUpError, match="no usable TPU chip"):
        prepare_tpu(config, ALONE, tmp_path)
    vfio_host(tmp_path, "0x0076", chips=4, nodes=4, functions=2)
    assert prepare_tpu(config, ALONE, tmp_path)["TPU_PROCESS_BOUNDS"] == "2,2,1,2"
    with pytest.raises(BringUpError, match="LOCAL_RANK and LOCAL_WORLD_SIZE are not set"):
        prepare_tpu(RuntimeConfig(platform="tpu"), ALONE, tmp_path)
    other = ALONE | {"TPU_ACCELERATOR_TYPE": "v5p-8"}
    with pytest.raises(TopologyError, match="v5p by TPU_ACCELERATOR_TYPE=v5p-8, and tpu7x by"):
        prepare_tpu(config, other, tmp_path)

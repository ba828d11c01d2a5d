"""What libtpu is told, against the vectors of torch_xla and JAX's bounds table."""

from typing import Any

import pytest

from tpu_dist.errors import TopologyError
from tpu_dist.runtime.tpu_environment import HostPlace, read_host_place, tpu_environment


def v4_16(worker: int) -> HostPlace:
    """Two hosts of four chips: torch_xla's test_internal_tpu.py."""
    return read_host_place(
        {
            "TPU_WORKER_HOSTNAMES": "worker0,worker1",
            "TPU_HOST_BOUNDS": "1,1,2",
            "TPU_WORKER_ID": str(worker),
        },
        num_chips=4,
        devices_per_chip=1,
    )


def test_v4_16_worker_1_process_0() -> None:
    variables = tpu_environment(v4_16(1), local_rank=0, local_world_size=4)
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


def test_v4_8_process_3() -> None:
    place = read_host_place({}, num_chips=4, devices_per_chip=1)
    variables = tpu_environment(place, local_rank=3, local_world_size=4)
    assert variables["TPU_PROCESS_BOUNDS"] == "2,2,1"
    assert variables["CLOUD_TPU_TASK_ID"] == "3"
    assert variables["TPU_PROCESS_PORT"] == "8479"
    assert variables["TPU_VISIBLE_CHIPS"] == "3"
    assert variables["TPU_PROCESS_ADDRESSES"] == ",".join(
        f"localhost:{p}" for p in range(8476, 8480)
    )


def test_one_chip_alone_is_a_slice_of_one() -> None:
    place = HostPlace(num_chips=1)
    variables = tpu_environment(place, local_rank=0, local_world_size=1)
    assert variables["TPU_PROCESS_BOUNDS"] == variables["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    assert variables["TPU_VISIBLE_CHIPS"] == "0"


@pytest.mark.parametrize(("chips", "bounds"), [(1, (1, 1, 1)), (4, (2, 2, 1)), (8, (2, 4, 1))])
def test_the_processes_of_one_host_stand_as_its_chips_do(
    chips: int, bounds: tuple[int, int, int]
) -> None:
    place = HostPlace(num_chips=chips)
    for local_rank in range(chips):
        variables = tpu_environment(place, local_rank=local_rank, local_world_size=chips)
        assert variables["TPU_PROCESS_BOUNDS"] == ",".join(map(str, bounds))


def test_two_devices_a_chip_add_a_fourth_bound() -> None:
    place = HostPlace(num_chips=4, devices_per_chip=2)
    variables = tpu_environment(place, local_rank=7, local_world_size=8)
    assert variables["TPU_PROCESS_BOUNDS"] == "2,2,1,2"
    assert variables["CLOUD_TPU_TASK_ID"] == "7"


def test_v4_256_has_every_process_once() -> None:
    hostnames = [f"host{i}" for i in range(32)]
    tasks, ports = [], set()
    for worker in range(32):
        place = read_host_place(
            {
                "TPU_WORKER_HOSTNAMES": ",".join(hostnames),
                "TPU_HOST_BOUNDS": "2,2,8",
                "TPU_WORKER_ID": str(worker),
            },
            num_chips=4,
            devices_per_chip=1,
        )
        for local_rank in range(4):
            variables = tpu_environment(place, local_rank=local_rank, local_world_size=4)
            task = int(variables["CLOUD_TPU_TASK_ID"])
            address = variables["TPU_PROCESS_ADDRESSES"].split(",")[task]
            assert address == f"host{worker}:{variables['TPU_PROCESS_PORT']}"
            assert variables["TPU_PROCESS_BOUNDS"] == "4,4,8"
            tasks.append(task)
            ports.add(variables["TPU_PROCESS_PORT"])
    assert tasks == list(range(128)) and len(ports) == 4


@pytest.mark.parametrize(("bounds", "worker"), [("TPU_PROCESS_BOUNDS", "CLOUD_TPU_TASK_ID")])
def test_the_newer_names_are_read_too(bounds: str, worker: str) -> None:
    place = read_host_place(
        {"TPU_WORKER_HOSTNAMES": "a,b", bounds: "1,2,1", worker: "1"},
        num_chips=4,
        devices_per_chip=1,
    )
    assert (place.host_bounds, place.worker_id) == ((1, 2, 1), 1)


def test_a_host_alone_ignores_what_another_slice_has_left() -> None:
    left_over = {"TPU_WORKER_HOSTNAMES": "me", "TPU_HOST_BOUNDS": "2,2,8", "TPU_WORKER_ID": "7"}
    assert read_host_place(left_over, num_chips=4, devices_per_chip=1) == HostPlace(num_chips=4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"TPU_HOST_BOUNDS": "2,2"}, "TPU_HOST_BOUNDS='2,2'"),
        ({"TPU_HOST_BOUNDS": "a,b,c"}, "TPU_HOST_BOUNDS='a,b,c'"),
        ({"TPU_WORKER_ID": "first"}, "TPU_WORKER_ID='first'"),
        ({"TPU_HOST_BOUNDS": "2,2,8"}, "lists 2 hosts.*grid of 32"),
        ({"TPU_WORKER_ID": "2"}, "TPU_WORKER_ID is 2"),
        ({"TPU_WORKER_ID": "-1"}, "TPU_WORKER_ID is -1"),
    ],
    ids=str,
)
def test_a_slice_that_contradicts_itself_is_refused(change: dict[str, str], said: str) -> None:
    sound = {
        "TPU_WORKER_HOSTNAMES": "a,b",
        "TPU_HOST_BOUNDS": "1,1,2",
        "TPU_WORKER_ID": "0",
    }
    with pytest.raises(TopologyError, match=said):
        read_host_place(sound | change, num_chips=4, devices_per_chip=1)


@pytest.mark.parametrize(
    ("place", "call", "said"),
    [
        (HostPlace(num_chips=4), {"local_rank": 0, "local_world_size": 1}, "4 TPU devices, and 1"),
        (HostPlace(num_chips=4), {"local_rank": 0, "local_world_size": 8}, "4 TPU devices, and 8"),
        (
            HostPlace(num_chips=4, devices_per_chip=2),
            {"local_rank": 0, "local_world_size": 4},
            "8 TPU devices, and 4",
        ),
        (HostPlace(num_chips=4), {"local_rank": 4, "local_world_size": 4}, "LOCAL_RANK is 4"),
        (HostPlace(num_chips=4), {"local_rank": -1, "local_world_size": 4}, "LOCAL_RANK is -1"),
        (HostPlace(num_chips=6), {"local_rank": 0, "local_world_size": 6}, "6 chips is not known"),
    ],
    ids=str,
)
def test_a_host_that_cannot_be_served_is_refused(
    place: HostPlace, call: dict[str, Any], said: str
) -> None:
    with pytest.raises(TopologyError, match=said):
        tpu_environment(place, **call)

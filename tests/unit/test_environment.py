"""What the environment says of a process: read once, nonsense refused."""

import pytest

from tpu_dist.runtime.environment import RuntimeConfig, read_environment


def test_an_empty_environment_says_nothing() -> None:
    assert read_environment({}) == RuntimeConfig()


def test_every_variable_is_read() -> None:
    config = read_environment(
        {
            "TPU_DIST_PLATFORM": "tpu",
            "TPU_DIST_HOST": "10.0.0.7",
            "LOCAL_RANK": "3",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "10.0.0.1",
            "MALLOC_TRIM_THRESHOLD_": "1",
        }
    )
    assert config == RuntimeConfig(
        platform="tpu",
        host="10.0.0.7",
        local_rank=3,
        local_world_size=4,
        master_address="10.0.0.1",
        tuned_malloc=True,
    )


def test_the_platform_may_be_in_capitals() -> None:
    assert read_environment({"TPU_DIST_PLATFORM": "CPU"}).platform == "cpu"


def test_a_variable_set_to_nothing_says_nothing() -> None:
    names = ["TPU_DIST_PLATFORM", "TPU_DIST_HOST", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    assert read_environment(dict.fromkeys(names, "")) == RuntimeConfig()


@pytest.mark.parametrize("nonsense", ["cuda", "gpu", "TPU v4", "1", "cpu,tpu"])
def test_an_unknown_platform_is_refused_with_those_there_are(nonsense: str) -> None:
    with pytest.raises(ValueError, match=r"TPU_DIST_PLATFORM must be one of cpu, tpu") as caught:
        read_environment({"TPU_DIST_PLATFORM": nonsense})
    assert repr(nonsense.lower()) in str(caught.value)


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("nonsense", ["one", "1.5", "0x1", "1 2"])
def test_a_number_that_is_none_is_refused_by_name(name: str, nonsense: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer, got {nonsense!r}"):
        read_environment({name: nonsense})


@pytest.mark.parametrize(
    ("rank", "size"), [("-1", "4"), ("4", "4"), ("0", "0"), ("0", "-2")], ids=str
)
def test_a_local_rank_outside_of_its_host_is_refused(rank: str, size: str) -> None:
    with pytest.raises(ValueError, match="LOCAL_(RANK|WORLD_SIZE)"):
        read_environment({"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size})

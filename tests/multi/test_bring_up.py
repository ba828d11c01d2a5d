"""Bring-up that cannot work: an error that names cause and cure, on every rank, soon."""

import os
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failures import all_reduce, assert_clean_exit, attempt
from ranks import BACKEND, Ranks, gloo_cannot, mark, run_ranks, wait_mark

pytestmark = gloo_cannot("it has no runtime to bring up")

LIMIT = timedelta(seconds=60)


def try_to_join(rank: int, seconds: float = 30) -> Any:
    return attempt(lambda: dist.init_process_group(BACKEND, timeout=timedelta(seconds=seconds)))


@pytest.mark.parametrize(
    ("env", "error", "said"),
    [
        ({"TPU_DIST_PLATFORM": "cuda"}, "ValueError", "TPU_DIST_PLATFORM must be one of cpu, tpu"),
        ({"LOCAL_RANK": "first"}, "ValueError", "LOCAL_RANK must be an integer, got 'first'"),
        ({"TPU_DIST_PLATFORM": "tpu"}, "BringUpError", "this host has no usable TPU chip"),
    ],
    ids=["platform", "local rank", "no tpu"],
)
def test_a_setting_that_cannot_work_is_named_with_the_cure(
    env: dict[str, str], error: str, said: str
) -> None:
    with Ranks(try_to_join, 2, init=False, env=env) as ranks:
        for outcome in ranks.results(LIMIT):
            assert outcome.ok, outcome.traceback
            result = outcome.value
            assert result.error == error and said in result.text, result
            assert result.seconds < 10


def test_an_address_that_is_not_this_hosts_is_named() -> None:
    env = {"TPU_DIST_HOST": "192.0.2.1"}
    with Ranks(try_to_join, 2, init=False, env=env, args=(6,)) as ranks:
        first, second = (outcome.value for outcome in ranks.results(LIMIT))
        assert first.error == second.error == "BringUpError", (first, second)
        assert "192.0.2.1" in first.text and "TPU_DIST_HOST" in first.text, first
        assert "192.0.2.1" in second.text or "rank 0" in second.text, second
        assert max(first.seconds, second.seconds) < 6 + 4


def two_devices(rank: int, jax_first: bool) -> Any:
    if jax_first:
        import jax

        assert len(jax.devices()) == 2
    result = try_to_join(rank)
    if result.ok:
        all_reduce(numel=300_000)
    return result


def test_one_of_two_cpu_devices_is_made_where_jax_is_yet_to_start() -> None:
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for result in run_ranks(two_devices, 2, init=False, env=env, args=(False,)):
        assert result.ok, result


def test_two_devices_in_a_process_are_refused_with_the_cure() -> None:
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    (result,) = run_ranks(two_devices, 1, init=False, env=env, args=(True,))
    assert result.error == "BringUpError" and "0: 2 devices" in result.text
    assert "remove --xla_force_host_platform_device_count from XLA_FLAGS" in result.text


def jax_first(rank: int) -> Any:
    import jax

    if rank == 0:
        jax.devices()
    started = time.monotonic()
    result = try_to_join(rank, 5)
    return result, time.monotonic() - started


def test_jax_initialised_before_on_one_rank_is_said_and_aborts_nobody() -> None:
    with Ranks(jax_first, 2, init=False) as ranks:
        outcomes = ranks.results(LIMIT)
        for outcome in outcomes:
            assert outcome.ok, outcome.traceback or outcome.died
        (first, _), (second, _) = (outcome.value for outcome in outcomes)
        assert first.error == "BringUpError"
        assert "JAX was initialised in this process before init_process_group" in first.text
        assert "Call init_process_group before the first JAX computation" in first.text
        assert second.error == "BringUpError" and "0" in second.text, second
        assert second.seconds < 5 + 10
        assert_clean_exit(ranks, [0, 1])


def everybody_has_jax(rank: int) -> Any:
    import jax

    jax.devices()
    return try_to_join(rank, 20)


def test_jax_initialised_before_on_every_rank_is_said_at_once() -> None:
    with Ranks(everybody_has_jax, 2, init=False) as ranks:
        for outcome in ranks.results(LIMIT):
            assert outcome.ok, outcome.traceback
            assert (
                outcome.value.error == "BringUpError"
                and "JAX was initialised" in outcome.value.text
            )
            assert outcome.value.seconds < 20


def world_of_one_with_jax(rank: int) -> None:
    """JAX was there before, and it is just what is needed: it is taken as it is."""
    import jax

    there = jax.devices()
    dist.init_process_group(BACKEND)
    all_reduce()
    all_reduce(numel=300_000)
    assert jax.devices() == there
    dist.destroy_process_group()


def test_a_jax_that_fits_is_used() -> None:
    run_ranks(world_of_one_with_jax, 1, init=False)


def late(rank: int, absent: int) -> Any:
    if rank == absent:
        for other in range(3):
            if other != absent:
                wait_mark(other, "gave up", timedelta(seconds=40))
        return None
    result = try_to_join(rank, 3)
    mark("gave up")
    return result


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_joins_is_named_on_every_waiting_rank(absent: int) -> None:
    with Ranks(late, 3, init=False, args=(absent,)) as ranks:
        for outcome in ranks.results(LIMIT):
            assert outcome.ok, outcome.traceback or outcome.died
            if outcome.rank != absent:
                result = outcome.value
                assert result.error == "BringUpError", result
                assert f"rank {absent}" in result.text or f"ranks [{absent}]" in result.text, result
                assert result.seconds < 3 + 4, result
        assert_clean_exit(ranks, [0, 1, 2])


def joined_after_a_failure(rank: int) -> None:
    """What failed inits leave behind does not spoil the next one."""
    if rank == 1:
        wait_mark(0, "gave up")
    first = try_to_join(rank, 1.5)
    assert first.error == "BringUpError", first
    mark("gave up")
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=30))
    all_reduce()
    dist.destroy_process_group()


def test_a_second_try_after_a_failed_one_succeeds() -> None:
    run_ranks(joined_after_a_failure, 2, init=False)


def killed_while_joining(rank: int) -> Any:
    if rank == 1:
        mark("joining")
        time.sleep(30)
    mark("joining")
    return try_to_join(rank, 4)


def test_a_rank_killed_while_the_others_join_is_named() -> None:
    with Ranks(killed_while_joining, 3, init=False) as ranks:
        for rank in range(3):
            ranks.wait_mark(rank, "joining")
        ranks.kill(1)
        for outcome in ranks.results(LIMIT, of=[0, 2]):
            assert outcome.ok, outcome.traceback or outcome.died
            assert outcome.value.error == "BringUpError", outcome.value
            assert "rank 1" in outcome.value.text or "ranks [1]" in outcome.value.text
            assert outcome.value.seconds < 4 + 4
        assert_clean_exit(ranks, [0, 2])


def forked(rank: int) -> tuple[str, str]:
    """A child that was forked after init tries to start its own."""
    all_reduce()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            dist.destroy_process_group()
            result = try_to_join(rank, 5)
            os.write(writer, f"{result.error}|{result.text}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        error, _, text = pipe.read().partition("|")
    os.waitpid(pid, 0)
    all_reduce()
    return error, text


def test_a_forked_child_is_told_to_be_spawned() -> None:
    for error, text in run_ranks(forked, 2):
        assert error == "BringUpError", (error, text)
        assert "forked from process" in text and "'spawn'" in text


def forked_helper(rank: int) -> None:
    """A child that does nothing with the group, as data loaders have them, harms nobody."""
    all_reduce()
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    if rank == 0:
        pid = os.fork()
        if pid == 0:
            sys.stdout.flush()
            import atexit

            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(pid, 0)
    all_reduce(numel=300_000)
    loader = torch.utils.data.DataLoader(range(8), num_workers=1, batch_size=4)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    all_reduce()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_helpers_harm_nobody() -> None:
    run_ranks(forked_helper, 2)


def without_a_default_group(rank: int) -> Any:
    dist.init_process_group("gloo")
    result = attempt(lambda: dist.new_group([0, 1], backend="tpu_dist"))
    dist.destroy_process_group()
    return result


def test_a_sub_group_under_another_backends_world_is_refused() -> None:
    for result in run_ranks(without_a_default_group, 2, init=False):
        assert result.error == "BringUpError"
        assert "call init_process_group('tpu_dist') first" in result.text


def on_another_platform(rank: int) -> Any:
    dist.destroy_process_group()
    os.environ["TPU_DIST_PLATFORM"] = "tpu"
    result = try_to_join(rank, 5)
    os.environ["TPU_DIST_PLATFORM"] = "cpu"
    return result


def test_a_process_keeps_its_platform() -> None:
    for result in run_ranks(on_another_platform, 1):
        assert result.error == "BringUpError" and "a process keeps its platform" in result.text


def mixed(rank: int) -> None:
    """A config by devices makes the same group: it serves CPU tensors itself."""
    dist.init_process_group("cpu:tpu_dist,tpu:tpu_dist")
    all_reduce(numel=300_000)
    assert type(dist.group.WORLD).__name__ == "ProcessGroup"
    assert dist.group.WORLD is not None and dist.group.WORLD.name() == "tpu_dist"
    dist.destroy_process_group()


def test_a_config_by_devices_makes_the_same_group() -> None:
    run_ranks(mixed, 2, init=False)


def jax_of_the_user(rank: int) -> None:
    """JAX's own defaults are left alone: a user's JAX code computes as it would without us."""
    import jax
    import jax.numpy as jnp

    all_reduce(numel=300_000)
    assert not jax.config.jax_enable_x64
    assert jnp.arange(3).dtype == "int32"
    assert float(jax.jit(lambda x: (x * 2).sum())(jnp.ones(4))) == 8.0
    assert len(jax.local_devices()) == 1 and jax.process_count() == 2


def test_jax_keeps_its_own_defaults() -> None:
    run_ranks(jax_of_the_user, 2)

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_dist.recipes.data import (
    IGNORED_TARGET,
    Batch,
    BatchConfig,
    StepBatch,
    TrainingBatches,
    Windows,
    evaluation_batches,
)


def counted(num_tokens: int, length: int) -> Windows:
    """Windows over the tokens 0, 1, 2 ..., so that each target is a number of its own."""
    return Windows(np.arange(num_tokens, dtype=np.int32), length)


def targets(batch: Batch) -> list[int]:
    return batch.targets[batch.targets != IGNORED_TARGET].tolist()


def targets_of_step(step: StepBatch) -> list[int]:
    return [target for one in step.passes for target in targets(one)]


@st.composite
def shards(draw: st.DrawFn) -> tuple[Windows, BatchConfig, int]:
    world_size = draw(st.integers(1, 5))
    accumulation_steps = draw(st.integers(1, 3))
    length = draw(st.integers(2, 9))
    config = BatchConfig(
        sequence_length=length,
        accumulation_steps=accumulation_steps,
        global_batch_size=world_size * accumulation_steps * draw(st.integers(1, 3)),
    )
    return counted(draw(st.integers(2, 200)), length), config, world_size


def everyone(
    windows: Windows, config: BatchConfig, world_size: int, position: int = 0
) -> list[TrainingBatches]:
    return [
        TrainingBatches(
            windows, config, seed=7, rank=rank, world_size=world_size, position=position
        )
        for rank in range(world_size)
    ]


@given(shards())
def test_an_epoch_covers_every_target_exactly_once(case: tuple[Windows, BatchConfig, int]) -> None:
    windows, config, world_size = case
    processes = everyone(windows, config, world_size)
    # As many steps as end on an epoch's last window, so whole epochs are seen.
    num_steps = len(windows)
    num_epochs = config.global_batch_size
    seen = Counter(
        target
        for _ in range(num_steps)
        for process in processes
        for target in targets_of_step(process.next_step())
    )
    assert seen == {target: num_epochs for target in range(1, windows.num_targets + 1)}


@given(shards(), st.integers(0, 12))
def test_batches_resume_at_any_position(
    case: tuple[Windows, BatchConfig, int], num_steps: int
) -> None:
    windows, config, world_size = case
    for process in everyone(windows, config, world_size):
        for _ in range(num_steps):
            process.next_step()
        (resumed,) = (
            other
            for other in everyone(windows, config, world_size, process.position)
            if other._rank == process._rank
        )
        for _ in range(3):
            expected, found = process.next_step(), resumed.next_step()
            assert expected.num_targets == found.num_targets
            for left, right in zip(expected.passes, found.passes, strict=True):
                assert torch.equal(left.inputs, right.inputs)
                assert torch.equal(left.targets, right.targets)


@given(shards())
def test_a_step_trains_on_the_same_windows_with_any_number_of_processes(
    case: tuple[Windows, BatchConfig, int],
) -> None:
    windows, config, world_size = case
    alone = BatchConfig(
        sequence_length=config.sequence_length, global_batch_size=config.global_batch_size
    )
    (one,), many = everyone(windows, alone, 1), everyone(windows, config, world_size)
    for _ in range(4):
        together = [target for p in many for target in targets_of_step(p.next_step())]
        assert sorted(targets_of_step(one.next_step())) == sorted(together)


@given(shards())
def test_every_process_knows_how_many_targets_all_have(
    case: tuple[Windows, BatchConfig, int],
) -> None:
    windows, config, world_size = case
    processes = everyone(windows, config, world_size)
    for _ in range(4):
        steps = [process.next_step() for process in processes]
        assert {step.num_targets for step in steps} == {sum(map(len, map(targets_of_step, steps)))}


def test_passes_have_equal_shapes() -> None:
    config = BatchConfig(sequence_length=4, global_batch_size=12, accumulation_steps=3)
    step = everyone(counted(30, 4), config, 2)[0].next_step()
    assert [tuple(one.inputs.shape) for one in step.passes] == [(2, 4)] * 3


def test_the_order_changes_with_the_epoch_and_the_seed() -> None:
    windows = counted(400, 4)
    config = BatchConfig(sequence_length=4, global_batch_size=len(windows))
    batches = TrainingBatches(windows, config, seed=7, rank=0, world_size=1)
    first, second = targets_of_step(batches.next_step()), targets_of_step(batches.next_step())
    other = TrainingBatches(windows, config, seed=8, rank=0, world_size=1).next_step()
    assert first != second
    assert first != targets_of_step(other)
    assert sorted(first) == sorted(second) == sorted(targets_of_step(other))


def test_a_target_is_the_token_after_its_input() -> None:
    batch = counted(11, 4).batch([0, 1, 2])
    assert batch.inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    ignored = IGNORED_TARGET
    assert batch.targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, ignored, ignored]]


@given(st.integers(2, 100), st.integers(2, 9), st.integers(1, 4), st.integers(1, 5))
def test_evaluation_sees_every_target_once_in_equal_batches(
    num_tokens: int, length: int, batch_size: int, world_size: int
) -> None:
    windows = counted(num_tokens, length)
    shares = [
        list(evaluation_batches(windows, batch_size=batch_size, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    assert {tuple(b.inputs.shape) for share in shares for b in share} == {(batch_size, length)}
    seen = sorted(target for share in shares for batch in share for target in targets(batch))
    assert seen == list(range(1, num_tokens))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    config = BatchConfig(global_batch_size=8, accumulation_steps=2)
    with pytest.raises(ValueError, match=r"8 does not divide among 3 processes times 2"):
        config.windows_a_pass(3)


@pytest.mark.parametrize("name", ["global_batch_size", "accumulation_steps", "sequence_length"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BatchConfig(**{name: 0})


def test_a_stream_without_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        counted(1, 4)

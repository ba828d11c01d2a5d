"""Checkpoints of a world of one: no process is started."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpu_dist.recipes import checkpoint
from tpu_dist.recipes.checkpoint import (
    CheckpointConfig,
    Checkpoints,
    TrainingState,
    whole_checkpoints,
)
from tpu_dist.recipes.errors import RunDirectoryError
from tpu_dist.recipes.schedule import OptimizerConfig, make_optimizer


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_state(*, width: int = 4) -> TrainingState:
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.RMSNorm(width))
    return TrainingState(model=model, optimizer=make_optimizer(model, OptimizerConfig()))


def advance(state: TrainingState) -> None:
    torch.manual_seed(state.step)
    state.model(torch.randn(5, 3)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1
    state.position += 8


def weights(state: TrainingState) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in state.model.parameters()]


def publish(directory: Path, name: str, *, metadata: bool = True) -> None:
    (directory / name).mkdir()
    (directory / name / "__0_0.distcp").touch()
    if metadata:
        (directory / name / ".metadata").touch()


def test_a_loaded_state_goes_on_exactly_as_the_saved_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, rank=0, keep_last=2)
    saved, loaded = make_state(), make_state()
    for _ in range(3):
        advance(saved)
    checkpoints.save(saved)
    checkpoints.load(loaded, step=3)
    assert (loaded.step, loaded.position) == (3, 24)
    for state in (saved, loaded):
        advance(state)
    for left, right in zip(weights(saved), weights(loaded), strict=True):
        assert torch.equal(left, right)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, rank=0, keep_last=2)
    state = make_state()
    for _ in range(4):
        advance(state)
        checkpoints.save(state)
    assert checkpoints.steps() == (3, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, rank=0, keep_last=2)
    state = make_state()
    checkpoints.save(state)
    state.position = 77
    checkpoints.save(state)
    checkpoints.load(state, step=0)
    assert state.position == 77
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def test_unfinished_saves_are_never_found(tmp_path: Path) -> None:
    publish(tmp_path, "step-00000010")
    publish(tmp_path, "step-00000020.partial")
    publish(tmp_path, "step-00000030", metadata=False)
    publish(tmp_path, "step-00000040.removed.partial")
    publish(tmp_path, "step-fifty")
    publish(tmp_path, "xstep-00000060")
    (tmp_path / "step-00000070").touch()
    assert whole_checkpoints(tmp_path) == (10,)
    assert whole_checkpoints(tmp_path / "missing") == ()


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (100_000_000, 99_999_999, 3):
        publish(tmp_path, f"step-{step:08d}")
    assert whole_checkpoints(tmp_path) == (3, 99_999_999, 100_000_000)


def test_a_save_cut_off_before_its_end_leaves_the_earlier_one_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(self: Checkpoints, partial: Path, published: Path) -> None:
        raise Killed

    checkpoints = Checkpoints(tmp_path, rank=0, keep_last=2)
    state = make_state()
    advance(state)
    checkpoints.save(state)
    advance(state)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "_publish", killed)
        with pytest.raises(Killed):
            checkpoints.save(state)
    assert (tmp_path / "step-00000002.partial").is_dir()
    assert checkpoints.steps() == (1,)
    checkpoints.remove_unfinished()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_save_that_fails_says_where_and_why(tmp_path: Path) -> None:
    (tmp_path / "step-00000000.partial").write_text("in the way")
    with pytest.raises(RunDirectoryError, match=r"step 0 .*step-00000000\.partial: rank 0: "):
        Checkpoints(tmp_path, rank=0, keep_last=1).save(make_state())


def test_leftovers_that_cannot_be_removed_are_named(tmp_path: Path) -> None:
    (tmp_path / "step-00000009.partial").write_text("a file, not a directory")
    with pytest.raises(RunDirectoryError, match=r"step-00000009\.partial, left by an interrupted"):
        Checkpoints(tmp_path, rank=0, keep_last=1).remove_unfinished()


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, rank=0, keep_last=1)
    checkpoints.save(make_state(width=4))
    with pytest.raises(RunDirectoryError, match="could not be read"):
        checkpoints.load(make_state(width=6), step=0)


def test_a_checkpoint_with_a_part_missing_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, rank=0, keep_last=1)
    for part in checkpoints.save(make_state()).glob("*.distcp"):
        part.unlink()
    with pytest.raises(RunDirectoryError, match=r"remove it; \[0\] are there"):
        checkpoints.load(make_state(), step=0)


@pytest.mark.parametrize(
    ("save_every", "steps"), [(0, [10]), (4, [4, 8, 10]), (5, [5, 10]), (99, [10])]
)
def test_the_last_step_is_always_saved(save_every: int, steps: list[int]) -> None:
    config = CheckpointConfig(save_every=save_every)
    assert [step for step in range(1, 11) if config.is_due(step, num_steps=10)] == steps


@pytest.mark.parametrize("settings", [{"save_every": -1}, {"keep_last": 0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        CheckpointConfig(**settings)


def test_the_name_of_the_metadata_file_is_torchs(tmp_path: Path) -> None:
    Checkpoints(tmp_path, rank=0, keep_last=1).save(make_state())
    assert (tmp_path / "step-00000000" / checkpoint._METADATA).is_file()

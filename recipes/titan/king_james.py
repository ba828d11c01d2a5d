"""Real text without a network: the King James Bible as a torchtitan dataset, and a tokenizer of it.

`compatibility.prepare` comes before this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from tpu_dist.recipes.text import Document, load_chapters, split
from tpu_dist.recipes.tokenizer import Tokenizer, TokenizerConfig, shared_tokenizer

TRAINING = "kjv"
VALIDATION = "kjv_validation"
ASSETS = "kjv"
"""As model.hf_assets_path: no directory of Hugging Face's, but a tokenizer trained at the start."""

VOCABULARY_SIZE = 2048
_HELD_OUT_EVERY = 20


class KingJamesTokenizer(BaseTokenizer):  # type: ignore[misc]  # torchtitan is untyped
    """The recipes' byte-level BPE as torchtitan's tokenizer; there is no token for a beginning."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.eos_id = tokenizer.end_of_text

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Ids of a text; `add_eos` ends it with end-of-text, `add_bos` adds nothing."""
        return self._tokenizer.encode(text) + [self._tokenizer.end_of_text] * add_eos

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return self._tokenizer.decode(ids)

    def get_vocab_size(self) -> int:
        """Number of tokens."""
        return self._tokenizer.vocabulary_size


def build_tokenizer(job_config: JobConfig) -> Any:
    """Return the tokenizer that model.hf_assets_path names. Collective where it is trained first.

    Raises:
        RecipeError: another process trains it, and it did not appear in time.
    """
    if job_config.model.hf_assets_path != ASSETS:
        return build_hf_tokenizer(job_config)
    directory = Path(job_config.job.dump_folder)
    directory.mkdir(parents=True, exist_ok=True)
    return KingJamesTokenizer(
        shared_tokenizer(
            directory,
            load_chapters(),
            TokenizerConfig(vocabulary_size=VOCABULARY_SIZE),
            rank=dist.get_rank(),
            timeout=timedelta(seconds=job_config.comm.init_timeout_seconds),
        )
    )


def register_datasets() -> None:
    """Make `kjv` and `kjv_validation` known as names of datasets."""
    for name in (TRAINING, VALIDATION):
        DATASETS[name] = DatasetConfig(
            path=name, loader=_loader(name), sample_processor=lambda sample: sample["text"]
        )


def _loader(name: str) -> Callable[[str], Dataset]:
    def load(path: str) -> Dataset:
        corpus = split(load_chapters(), held_out_every=_HELD_OUT_EVERY)
        documents: tuple[Document, ...] = corpus.training if name == TRAINING else corpus.validation
        return Dataset.from_list([{"text": document.text} for document in documents])

    return load

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="needs the recipes extra")

from tpu_dist.recipes.errors import MissingDependencyError, RecipeError  # noqa: E402
from tpu_dist.recipes.text import Document  # noqa: E402
from tpu_dist.recipes.tokenizer import (  # noqa: E402
    Tokenizer,
    TokenizerConfig,
    shared_tokenizer,
    train_tokenizer,
)

DOCUMENTS = (
    Document(name="one", text="In the beginning God created the heaven and the earth.\n" * 20),
    Document(name="two", text="And the earth was without form, and void;" * 20),
)
CONFIG = TokenizerConfig(vocabulary_size=300)
TOKENIZER = train_tokenizer(DOCUMENTS, CONFIG)


@given(st.text())
def test_any_text_comes_back_as_it_was(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.binary())
def test_text_of_any_bytes_comes_back_as_it_was(content: bytes) -> None:
    for text in (content.decode("latin-1"), content.decode("utf-8", errors="replace")):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(0, TOKENIZER.vocabulary_size - 1)))
def test_any_tokens_decode_even_where_they_are_no_utf8(tokens: list[int]) -> None:
    assert isinstance(TOKENIZER.decode(tokens), str)


@pytest.mark.parametrize("text", ["<|endoftext|>", "<s></s>", "[UNK]", "\0", ""])
def test_no_text_spells_a_special_token(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.end_of_text not in tokens
    assert TOKENIZER.decode(tokens) == text


def test_the_vocabulary_has_the_size_asked_for_and_end_of_text_is_its_last() -> None:
    assert TOKENIZER.vocabulary_size == CONFIG.vocabulary_size
    assert TOKENIZER.end_of_text == CONFIG.vocabulary_size - 1


def test_a_small_corpus_yields_a_smaller_vocabulary_rather_than_an_error() -> None:
    small = train_tokenizer((Document(name="x", text="ab"),), TokenizerConfig())
    assert 257 <= small.vocabulary_size < 300
    assert small.decode(small.encode("zebra")) == "zebra"


def test_documents_are_joined_with_end_of_text() -> None:
    stream = TOKENIZER.encode_documents(DOCUMENTS).tolist()
    end = TOKENIZER.end_of_text
    assert stream == [*TOKENIZER.encode(DOCUMENTS[0].text), end] + [
        *TOKENIZER.encode(DOCUMENTS[1].text),
        end,
    ]


def test_training_is_deterministic_and_survives_a_file(tmp_path: Path) -> None:
    train_tokenizer(DOCUMENTS, CONFIG).save(tmp_path / "one.json")
    TOKENIZER.save(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    loaded = Tokenizer.load(tmp_path / "one.json")
    assert loaded.encode(DOCUMENTS[0].text) == TOKENIZER.encode(DOCUMENTS[0].text)
    assert loaded.end_of_text == TOKENIZER.end_of_text


def share(directory: Path, *, rank: int, config: TokenizerConfig = CONFIG) -> Tokenizer:
    return shared_tokenizer(
        directory, DOCUMENTS, config, rank=rank, timeout=timedelta(milliseconds=100)
    )


def test_other_ranks_take_what_rank_0_published(tmp_path: Path) -> None:
    share(tmp_path, rank=0)
    (published,) = tmp_path.iterdir()
    before = published.stat().st_mtime_ns
    assert share(tmp_path, rank=1).encode("the earth") == TOKENIZER.encode("the earth")
    share(tmp_path, rank=0)
    assert published.stat().st_mtime_ns == before


def test_a_tokenizer_made_from_something_else_is_not_taken(tmp_path: Path) -> None:
    share(tmp_path, rank=0, config=TokenizerConfig(vocabulary_size=280))
    with pytest.raises(RecipeError, match="waited 0.1 s for rank 0"):
        share(tmp_path, rank=1)


def test_a_damaged_tokenizer_file_says_so(tmp_path: Path) -> None:
    share(tmp_path, rank=0)
    (published,) = tmp_path.iterdir()
    published.write_text("{}")
    with pytest.raises(RecipeError, match="Remove it"):
        share(tmp_path, rank=1)


@pytest.mark.parametrize("size", [-1, 0, 256, 65_537])
def test_a_vocabulary_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="257 to 65536"):
        TokenizerConfig(vocabulary_size=size)


def test_a_missing_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "tpu-dist\[recipes\]"'):
        train_tokenizer(DOCUMENTS, CONFIG)

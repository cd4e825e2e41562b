"""Tokens put together from those of words are those that the library makes of whole texts."""

from __future__ import annotations

import threading
from itertools import chain
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.data.text import words as module
from nimble_jobs.data.text.tokenizer import Tokenizer, TokenRules
from nimble_jobs.data.text.words import Words

tokenizers = pytest.importorskip("tokenizers")

PIECES = ["un", "able", "cafe", "the", "a", "b", "x", "中", "-", ".", "'", "q"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *PIECES, *(f"##{piece}" for piece in PIECES)]
ODD = [
    "", " ", "  the  un ", "unable\tthe\nun", "un\u00a0able", "un\u2003the", "café", "cafe\u0301", "the \u0301un",
    "x" * 101, "x" * 100, "un\x00able", "\x1fthe", "a中b", "中 中", "[SEP]", "a[SEP]b", " [MASK] the", "a-b.c'",
    "UNABLE", "\U0001f600 the", "\u200bthe", "ΣΑΣ", "İ the", "\ufffd",
]  # fmt: skip


def wordpiece(*, added: tuple[Any, ...] = (), **normalizer: Any) -> Any:
    """A tokenizer of BERT's kind."""
    vocabulary = {piece: number for number, piece in enumerate(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(**normalizer)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    made.add_special_tokens([tokenizers.AddedToken("[MASK]", lstrip=True)])
    made.add_tokens(list(added))
    return made


def whole(made: Any, texts: list[str], limit: int, truncate: str) -> tuple[list[int], list[int], list[bool]]:
    """What the library makes of whole texts."""
    made.no_truncation()
    if truncate != "error":
        made.enable_truncation(limit, direction="right" if truncate == "end" else "left")
    found = made.encode_batch(texts)
    made.no_truncation()
    ids = [one.ids for one in found]
    return list(chain.from_iterable(ids)), list(map(len, ids)), [bool(one.overflowing) for one in found]


@pytest.mark.parametrize("truncate", ["end", "start", "error"])
@pytest.mark.parametrize("normalizer", [{}, {"strip_accents": False, "lowercase": False}, {"clean_text": False}])
@given(texts=st.lists(st.lists(st.sampled_from(ODD) | st.text(max_size=5), max_size=5).map(" ".join), max_size=5))
@settings(max_examples=60)
def test_tokens_are_the_librarys(
    truncate: Literal["end", "start", "error"], normalizer: dict[str, bool], texts: list[str]
) -> None:
    made = wordpiece(**normalizer)
    words = Words.of(made)
    assert words is not None
    for _ in range(2):  # once the words are new, once they are known
        ids, lengths, cut = words(texts, 6, truncate)
        assert (ids.tolist(), lengths.tolist(), cut.tolist()) == whole(made, texts, 6, truncate)
    assert [words.count(text) for text in texts] == [len(made.encode(t, add_special_tokens=False).ids) for t in texts]


def test_added_tokens_count_as_in_whole_texts() -> None:
    made = wordpiece(added=(tokenizers.AddedToken("<b>", single_word=True), tokenizers.AddedToken("qq", lstrip=True)))
    words = Words.of(made)
    assert words is not None
    texts = ["the <b> x", "x<b>", "<b>.", "a qq b", "qqqq"]
    ids, lengths, _ = words(texts, 99, "end")
    assert (ids.tolist(), lengths.tolist()) == whole(made, texts, 99, "end")[:2]


def test_tokenizers_whose_words_depend_on_each_other_are_refused() -> None:
    """Tokens with spaces, other ways to split, and other normalizers."""
    assert Words.of(wordpiece(added=("un able",))) is None
    other = wordpiece()
    other.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    assert Words.of(other) is None
    other = wordpiece()
    other.normalizer = tokenizers.normalizers.Sequence([other.normalizer, tokenizers.normalizers.Replace(" ", "")])
    assert Words.of(other) is None
    other.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase()])
    assert Words.of(other) is not None
    other = tokenizers.Tokenizer(tokenizers.models.BPE())
    other.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    assert Words.of(other) is None


def test_a_vocabulary_without_unknown_words_may_lack_the_sample() -> None:
    bases = tokenizers.Tokenizer(tokenizers.models.WordLevel({"c": 0, "g": 1}, unk_token="[UNK]"))
    bases.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    assert texts_of(Tokenizer(bases.to_str().encode(), TokenRules(limit=8), name="t"), ["c g"]) == [[0, 1]]


def test_words_are_collected_anew_once_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WORDS", 3)
    made = wordpiece()
    words = Words.of(made)
    assert words is not None
    for texts in (["a b"], ["x the un"], ["a b x"], ["un"]):
        assert words(texts, 99, "end")[0].tolist() == whole(made, texts, 99, "end")[0]
        assert len(words._known.numbers) < 3


def test_threads_share_the_words() -> None:
    made = wordpiece()
    words = Words.of(made)
    assert words is not None
    texts = [f"a{i % 97} un{i % 89}able the" for i in range(400)]
    expected = whole(made, texts, 99, "end")[0]
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(words(texts, 99, "end")[0].tolist())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


def texts_of(made: Tokenizer, texts: list[str | None]) -> list[list[int]]:
    found = made(texts)
    return [part.tolist() for part in np.split(found.ids, np.cumsum(found.lengths)[:-1])]


def test_texts_without_common_words_go_to_the_library_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TRIAL", 8)
    made = Tokenizer(wordpiece().to_str().encode(), TokenRules(limit=16), name="t")
    assert made.piece > 256
    texts: list[str | None] = [f"a{i}中" for i in range(100)]
    first = texts_of(made, texts)
    assert made.piece == 256
    assert texts_of(made, texts) == first


def test_words_that_differ_from_the_library_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may do what its parts do not tell."""
    made = Tokenizer(wordpiece().to_str().encode(), TokenRules(limit=16), name="t")
    expected = texts_of(Tokenizer(wordpiece().to_str().encode(), TokenRules(limit=16), name="t"), ["the cafe"])
    assert made._words is not None
    monkeypatch.setattr(made._words, "_begin", np.array([7], dtype=np.int32))
    assert texts_of(made, ["the cafe"]) == expected
    assert made.piece == 256


def test_bad_texts_have_no_tokens() -> None:
    made = Tokenizer(wordpiece().to_str().encode(), TokenRules(limit=16, vocabulary=9), name="t")
    found = made(["the", "a b", None, "the x"])
    assert found.lengths.tolist() == [3, 0, 0, 0]
    assert found.ids.tolist() == [2, 8, 3]
    assert set(found.bad) == {1, 3}
    assert "'b' has the id 10" in found.bad[1]
    assert "'x' has the id 11" in found.bad[3]

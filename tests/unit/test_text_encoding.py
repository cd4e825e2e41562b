"""Texts and pairs are cut as the library cuts them, without the memory that its own truncation takes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.data.text import encoding
from nimble_jobs.data.text.encoding import encoded
from nimble_jobs.data.text.tokenizer import Tokenizer, TokenRules
from tests import prefork

tokenizers = pytest.importorskip("tokenizers")

CORPUS = ["the cat sat on the mat, aaaa bbb", "a cat and a dog: aaaaaaaa", "mat cat catmat dog 中文"] * 20
WORDS = ["the", "cat", "catmat", "dog,", "aaaaaaa", "aaa", "zq", "中文", "<s>", "\n", "  ", "e\u0301"]
TEXT = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=12).map(" ".join)
LONG = st.lists(st.sampled_from(WORDS), min_size=3, max_size=5).map(lambda words: " ".join(words * 40))
ENDS = [("<s>", 1), ("</s>", 2)]


def trained(kind: str) -> Any:
    """A small tokenizer with a template of its own."""
    special = ["<unk>", "<s>", "</s>"]
    parts, common = tokenizers.pre_tokenizers, {"special_tokens": special, "show_progress": False, "vocab_size": 320}
    if kind == "BPE":
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = parts.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=parts.ByteLevel.alphabet(), **common)
    elif kind == "Unigram":
        made = tokenizers.Tokenizer(tokenizers.models.Unigram())
        made.pre_tokenizer = parts.Metaspace()
        trainer = tokenizers.trainers.UnigramTrainer(unk_token="<unk>", **common)
    else:
        made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer = parts.BertPreTokenizer()
        trainer = tokenizers.trainers.WordPieceTrainer(**common)
    made.train_from_iterator(CORPUS, trainer)
    return made


@cache
def tokenizer(kind: str, template: str) -> Any:
    made = trained(kind)
    processors = tokenizers.processors
    if template == "roberta":
        made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    elif template == "turned":  # the second text comes first
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s>:1 $B:1 </s> $A", special_tokens=ENDS
        )
    elif template == "bert":
        made.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    return made


def expected(made: Any, text: Any, limit: int, truncate: str) -> Any:
    """The library's own truncation of the whole text."""
    made.enable_truncation(limit, strategy="longest_first", direction="right" if truncate == "end" else "left")
    found = made.encode(*text) if isinstance(text, tuple) else made.encode(text)
    made.no_truncation()
    return found


def spans(made: Any, text: Any, cut: Any, truncate: str) -> list[tuple[int, int]]:
    """Where the tokens that are left lie in the whole text. After a cut at the start, the library lets some begin with
    a space that they have nowhere else.
    """
    whole = made.encode(*text) if isinstance(text, tuple) else made.encode(text)
    left: dict[int | None, list[tuple[int, int]]] = {None: [(0, 0)] * len(whole)}
    for number in (0, 1):
        own = [span for span, of in zip(whole.offsets, whole.sequence_ids, strict=True) if of == number]
        count = cut.sequence_ids.count(number)
        left[number] = own[:count] if truncate == "end" else own[len(own) - count :]
    return [left[number].pop(0) for number in cut.sequence_ids]


KINDS = pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece"])
TRUNCATE = pytest.mark.parametrize("truncate", ["end", "start"])


@KINDS
@TRUNCATE
@pytest.mark.parametrize("template", ["roberta", "turned", "bert", "none"])
@given(texts=st.lists(TEXT | st.tuples(TEXT, TEXT), max_size=6), limit=st.integers(5, 24))
@settings(max_examples=40)
def test_what_is_left_is_what_the_library_leaves(
    kind: str, template: str, truncate: Literal["end", "start"], texts: list[Any], limit: int
) -> None:
    """Tokens, types and offsets of texts and pairs, and which ones lost tokens."""
    made = tokenizer(kind, template)
    rules = TokenRules(limit=limit, truncate=truncate, types=True, offsets=True)
    found = Tokenizer(made.to_str().encode(), rules, name="t")(texts)
    without = Tokenizer(made.to_str().encode(), replace(rules, offsets=False), name="t")(texts)
    assert found.types is not None
    assert without.types is not None
    assert without.types.tolist() == found.types.tolist()
    assert found.offsets is not None
    known = [expected(made, text, limit, truncate) for text in texts]
    assert found.lengths.tolist() == [len(one) for one in known]
    assert found.ids.tolist() == [token for one in known for token in one.ids]
    assert found.types.tolist() == [kind for one in known for kind in one.type_ids]
    wanted = [span for text, one in zip(texts, known, strict=True) for span in spans(made, text, one, truncate)]
    assert [tuple(span) for span in found.offsets.tolist()] == wanted
    assert found.shortened.tolist() == [bool(one.overflowing) for one in known]


@KINDS
@TRUNCATE
@given(texts=st.lists(LONG | st.tuples(LONG, LONG | TEXT), min_size=1, max_size=3), limit=st.sampled_from([10, 12]))
@settings(max_examples=20)
def test_long_texts_are_cut_as_if_they_were_tokenized_whole(
    kind: str, truncate: Literal["end", "start"], texts: list[Any], limit: int
) -> None:
    """Though only a part of each is tokenized."""
    made = tokenizer(kind, "roberta")
    found = Tokenizer(made.to_str().encode(), TokenRules(limit=limit, truncate=truncate), name="t")(texts)
    known = [expected(made, text, limit, truncate) for text in texts]
    assert found.ids.tolist() == [token for one in known for token in one.ids]
    assert found.shortened.tolist() == [bool(one.overflowing) for one in known]


PAIR = """
import resource, tokenizers
from nimble_jobs.data.text.tokenizer import Tokenizer, TokenRules
made = tokenizers.Tokenizer(tokenizers.models.BPE())
made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
trainer = tokenizers.trainers.BpeTrainer(vocab_size=2, show_progress=False)
made.train_from_iterator(["aaaaaaaa"] * 9, trainer)
ours = Tokenizer(made.to_str().encode(), TokenRules(limit=64, truncate="start"), name="t")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ours([("a" * 500_001, "a" * 500_001)])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_two_texts_without_spaces_take_little_memory() -> None:
    """The library would keep all combinations of what it cuts off: gigabytes for a limit of 512."""
    assert int(prefork.run_light(PAIR).stdout) < 200 << 10  # KiB


def test_few_characters_are_tokenized_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a text that is longer is given alone. The order stays."""
    monkeypatch.setattr(encoding, "_AT_ONCE", 10)
    batches: list[list[Any]] = []

    def encode(batch: Any) -> list[Any]:
        batches.append(list(batch))
        return list(batch)

    texts = ["abcd", ("abc", "abc"), "ab", "", "x" * 30, "abc", "abcdefg", "a"]
    assert list(encoded(encode, texts)) == texts
    assert batches == [["abcd", ("abc", "abc")], ["ab", ""], ["x" * 30], ["abc", "abcdefg"], ["a"]]

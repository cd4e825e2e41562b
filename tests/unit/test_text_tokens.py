"""Texts to tokens: what is cut, what is bad, and which rows of bytes the model gets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.buckets import rows_of
from nimble_jobs.data.text.tokenizer import Tokenizer, TokenRules
from nimble_jobs.errors import ModelError
from nimble_jobs.models.tokenizer_file import tokenizer_json
from nimble_jobs.packing import text_layout
from nimble_jobs.spec.text import TOKENS_ON_CPU, TOKENS_PER_BATCH
from nimble_jobs.workloads.text.feed import fill
from nimble_jobs.workloads.text.survey import SAMPLE, Survey, chosen
from nimble_jobs.workloads.text.windows import plan, records_of, spans
from tests.text_models import write_tokenizer

tokenizers = pytest.importorskip("tokenizers")

# Of tests.text_models: [PAD] [UNK] [CLS] [SEP] [MASK] the a cat dog sat ran on mat
CLS, SEP, THE, CAT, SAT, MAT = 2, 3, 5, 7, 9, 12


def tokenizer(folder: Path, limit: int = 16, **rules: Any) -> Tokenizer:
    write_tokenizer(folder)
    return Tokenizer(tokenizer_json(folder), TokenRules(limit=limit, **rules), name="t")


def tokens(made: Tokenizer, *texts: Any) -> list[list[int]]:
    found = made(texts)
    ends = np.cumsum(found.lengths)
    return [found.ids[end - n : end].tolist() for end, n in zip(ends, found.lengths, strict=True)]


def test_special_tokens_are_added_as_the_template_says(tmp_path: Path) -> None:
    """Empty and blank texts have only these; None has no tokens."""
    made = tokenizer(tmp_path)
    assert tokens(made, "the cat", "", "  ", None) == [[CLS, THE, CAT, SEP], [CLS, SEP], [CLS, SEP], []]


def test_special_tokens_in_a_text_count_as_such(tmp_path: Path) -> None:
    """As in transformers, whose users may join texts in this way."""
    assert tokens(tokenizer(tmp_path), "the [SEP] cat") == [[CLS, THE, SEP, CAT, SEP]]


def test_the_prompt_stands_before_each_text(tmp_path: Path) -> None:
    assert tokens(tokenizer(tmp_path, prompt="the "), "cat", "") == [[CLS, THE, CAT, SEP], [CLS, THE, SEP]]


def test_lower_case(tmp_path: Path) -> None:
    assert tokens(tokenizer(tmp_path, lower_case=True), "The CAT") == [[CLS, THE, CAT, SEP]]


@pytest.mark.parametrize(("truncate", "kept"), [("end", [THE, CAT, SAT]), ("start", [SAT, 11, MAT])])
def test_long_texts_are_cut_and_counted(tmp_path: Path, truncate: Any, kept: list[int]) -> None:
    """A text of exactly the limit is whole."""
    made = tokenizer(tmp_path, limit=5, truncate=truncate)
    found = made(["the cat sat on mat", "the cat sat", "the"])
    assert found.lengths.tolist() == [5, 5, 3]
    assert found.ids.tolist()[:5] == [CLS, *kept, SEP]
    assert found.cut == 1


def test_long_texts_may_be_errors(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, limit=5, truncate="error")(["the cat sat", "the cat sat on"])
    assert found.lengths.tolist() == [5, 0]
    assert found.bad == {1: "has more than 5 tokens; to cut longer texts, set input.text.truncate: end"}
    assert found.cut == 0


@pytest.mark.parametrize("truncate", ["end", "start", "error"])
@pytest.mark.parametrize("text", ["the cat sat on mat . " * 20_000, " " * 500_000 + "the cat", "x" * 500_000])
def test_very_long_texts_give_the_tokens_of_the_whole_text(tmp_path: Path, text: str, truncate: Any) -> None:
    """Though only the part that counts is tokenized."""
    made = tokenizer(tmp_path, limit=12, truncate=truncate)
    whole = made._whole.encode(text).ids
    if len(whole) > 12 and truncate == "error":
        assert list(made([text]).bad) == [0]
        return
    body = whole[1:-1]
    kept = body[-10:] if truncate == "start" else body[:10]
    assert tokens(made, text) == [[CLS, *kept, SEP]]
    assert made([text]).cut == (len(whole) > 12)


@pytest.mark.parametrize("truncate", ["end", "start"])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("width", range(322, 332, 2))
def test_a_word_at_the_cut_of_a_very_long_text_does_not_count(width: int, offsets: bool, truncate: Any) -> None:
    """Half of a word may have many tokens although the whole one has a single one, because it is too long."""
    vocabulary = {"[UNK]": 0, "the": 1, "ab": 2, "##ab": 3}
    library = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=60)
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made = Tokenizer(library.to_str().encode(), TokenRules(limit=8, truncate=truncate, offsets=offsets), name="t")
    library.enable_truncation(8, direction="right" if truncate == "end" else "left")
    few, many = "the the the", "the " * 20
    text = f"{few:<{width}}{'ab' * 80} {many}" if truncate == "end" else f"{many}{'ab' * 80}{few:>{width}}"
    assert tokens(made, text) == [library.encode(text).ids]


@pytest.mark.parametrize("length", range(600, 608))
def test_a_long_run_of_one_character_keeps_the_tokens_of_its_end(length: int) -> None:
    """Where tokens begin in it depends on where it begins."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.train_from_iterator(["aaaaaaaa"] * 9, tokenizers.trainers.BpeTrainer(vocab_size=6, show_progress=False))
    made = Tokenizer(library.to_str().encode(), TokenRules(limit=8, truncate="start"), name="t")
    library.enable_truncation(8, direction="left")
    assert tokens(made, "a" * length) == [library.encode("a" * length).ids]


def test_pairs_lose_tokens_of_the_longer_text_first(tmp_path: Path) -> None:
    """As transformers' longest_first does. The second text's tokens have type 1 if the model tells them apart."""
    made = tokenizer(tmp_path, limit=8, types=True)
    found = made([("the cat sat on mat", "the"), ("cat", "mat")])
    assert found.types is not None
    assert found.lengths.tolist() == [8, 5]
    assert found.ids.tolist() == [CLS, THE, CAT, SAT, 11, SEP, THE, SEP, CLS, CAT, SEP, MAT, SEP]
    assert found.types.tolist() == [0] * 6 + [1] * 2 + [0, 0, 0, 1, 1]
    assert found.cut == 1
    long = tokenizer(tmp_path, limit=8, types=True)([("the " * 10_000, "mat"), ("cat", "mat " * 10_000)])
    assert (long.lengths.tolist(), long.cut) == ([8, 8], 2)


def test_tokens_that_the_model_does_not_know(tmp_path: Path) -> None:
    """A tokenizer with more tokens than the model: only records with such a token are bad."""
    found = tokenizer(tmp_path, vocabulary=10)(["the cat", "the mat"])
    assert found.lengths.tolist() == [4, 0]
    assert found.bad == {1: "token 'mat' has the id 12; expected ids below 10, the size of the model's vocabulary"}


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    """It adds nothing, so an empty text has no tokens, and no vector."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain = Tokenizer(made.to_str().encode(), TokenRules(limit=2), name="t")
    assert tokens(plain, "a b c", "a", "") == [[1, 0], [1], []]
    assert plain([""]).bad == {0: "has no tokens; expected at least one"}
    assert plain.padding == 0


def test_settings_of_the_file_do_not_count(tmp_path: Path) -> None:
    """A tokenizer.json may be set to pad and to cut; the job decides that."""
    write_tokenizer(tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.enable_padding(length=32, pad_id=4)
    made.enable_truncation(3)
    own = Tokenizer(made.to_str().encode(), TokenRules(limit=16), name="t")
    assert tokens(own, "the cat sat") == [[CLS, THE, CAT, SAT, SEP]]
    assert own.padding == 4


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^t: cannot be read as a tokenizer \(.*\); expected a tokenizer\.json$"):
        Tokenizer(b"{}", TokenRules(limit=16), name="t")
    with pytest.raises(ModelError, match=r"max_length: found 2, but the tokenizer adds 3 tokens of its own"):
        tokenizer(tmp_path, limit=2)


def test_a_limit_that_leaves_no_room_for_words(tmp_path: Path) -> None:
    """The message names the smallest limit, which works. Texts alone need less room than pairs."""
    with pytest.raises(ModelError, match=r"adds 2 tokens of its own to a text, .*; expected at least 3$"):
        tokenizer(tmp_path, limit=2, alone=True)
    assert tokens(tokenizer(tmp_path, limit=3, alone=True), "the cat") == [[CLS, THE, SEP]]
    with pytest.raises(ModelError, match=r"adds 3 tokens of its own to a pair, .*; expected at least 4$"):
        tokenizer(tmp_path, limit=3)
    assert tokenizer(tmp_path, limit=4)([("the", "cat sat")]).cut == 1


def test_a_folder_with_a_vocabulary_only(tmp_path: Path) -> None:
    """It is converted as transformers does."""
    pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    made = Tokenizer(tokenizer_json(tmp_path), TokenRules(limit=16), name="t")
    assert tokens(made, "the cats") == [[2, 5, 6, 7, 3]]


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such tokenizer"):
        tokenizer_json(tmp_path / "none")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(9, 12))
def test_rows_hold_their_tokens_and_padding(lengths: list[int], width: int) -> None:
    """Each row has its tokens, then the padding; the mask is made of the length."""
    starts = np.cumsum([0, *lengths])[:-1]
    ids = np.arange(100, 100 + sum(lengths), dtype=np.int32)
    layout = text_layout(width, token_types=True)
    rows = layout.empty(len(lengths))
    rows[:] = 7
    fill(layout.fields(rows), ids, (ids % 2).astype(np.uint8), starts, np.array(lengths), 1)
    fields = layout.unpack(rows)
    for i, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        assert fields["input_ids"][i].tolist() == [*range(100 + start, 100 + start + n), *[1] * (width - n)]
        assert fields["token_type_ids"][i, :n].tolist() == [(100 + start + j) % 2 for j in range(n)]
    assert fields["attention_mask"].tolist() == lengths


LENGTHS = st.lists(st.integers(0, 32), min_size=1, max_size=80)


@settings(max_examples=300)
@given(LENGTHS, st.booleans(), st.booleans())
def test_every_record_is_in_one_batch_that_it_fits(lengths: list[int], pads: bool, descending: bool) -> None:
    """Records of length 0 are in none, and each bucket's batches follow each other."""
    buckets, rows = (8, 16, 32), (6, 4, 2)
    found = plan(np.array(lengths), buckets, rows, pads=pads, descending=descending)
    assert sorted(i for one in found for i in one.rows.tolist()) == [i for i, n in enumerate(lengths) if n]
    for one in found:
        assert 0 < len(one.rows) <= rows[one.bucket]
        assert all(lengths[i] <= buckets[one.bucket] for i in one.rows)
    order = [one.bucket for one in found]
    assert order == sorted(order, reverse=descending)
    for bucket in set(order):
        short = [one for one in found if one.bucket == bucket and len(one.rows) < rows[bucket]]
        assert len(short) <= 1


def test_short_batches_join_the_next_bucket_if_that_takes_fewer_tokens() -> None:
    """One text of 5 tokens costs 16 in the next bucket, and a batch of 48 in its own."""
    lengths = np.array([5, 12, 12, 12])
    assert [one.rows.tolist() for one in plan(lengths, (8, 16), (6, 4), pads=True)] == [[0, 1, 2, 3]]
    assert [one.bucket for one in plan(lengths, (8, 16), (6, 4), pads=False)] == [0, 1]


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 40), st.sets(st.integers(0, 60)))
def test_windows_are_whole_shards(total: int, shard: int, records: int, done: set[int]) -> None:
    """They cover every shard that is not finished, and are cut at the same places whatever is finished."""
    shards = [(a, min(a + shard, total)) for a in range(0, total, shard)]
    every, left = spans(shards, (), records), spans(shards, done, records)
    assert [s for one in every for s in range(one.first, one.last + 1)] == list(range(len(shards)))
    assert set(left) <= set(every)
    assert {s for one in left for s in range(one.first, one.last + 1)} >= set(range(len(shards))) - done
    for one in every:
        assert (one.start, one.stop) == (shards[one.first][0], shards[one.last][1])
        assert one.stop - one.start <= max(records, shard)


def test_outputs_of_unknown_size_are_held_for_one_shard() -> None:
    assert records_of(["id", "last_hidden_state"], pads=True, mean=9) == 1024
    many, few = (records_of(["id", "embedding"], pads=pads, mean=200) for pads in (True, False))
    assert many > few > 1024


def test_windows_of_short_texts_have_more_records() -> None:
    """A batch takes more of them; memory still has a bound."""
    found = [records_of(["id", "embedding"], pads=True, mean=mean) for mean in (1, 40, 100, 500)]
    assert found == [65_536, 52_429, 20_972, 16_384]


@pytest.mark.parametrize("sigma", [0.6, 0.9])
@pytest.mark.parametrize("median", [12, 40, 120, 400])
@pytest.mark.parametrize("pads", [True, False])
def test_little_of_what_is_computed_is_padding(median: int, sigma: float, pads: bool) -> None:
    """Empty rows of short batches included. Log-normal lengths of up to 512 tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, 131_072)
    lengths = np.clip(np.rint(drawn), 3, 512).astype(np.int64)
    window = records_of(["embedding"], pads=pads, mean=float(lengths.mean()))
    tokens = TOKENS_PER_BATCH if pads else TOKENS_ON_CPU
    sample = Survey(lengths=dict(Counter(lengths[:: len(lengths) // SAMPLE].tolist())), whole=False)
    buckets = chosen(sample, limit=512, stored=(), window=window, tokens=tokens, pads=pads)
    rows = [rows_of(bucket, tokens) for bucket in buckets]
    computed = 0
    for number, first in enumerate(range(0, len(lengths), window)):
        for one in plan(lengths[first : first + window], buckets, rows, pads=pads, descending=number % 2 == 1):
            computed += buckets[one.bucket] * (rows[one.bucket] if pads else len(one.rows))
    share = 1 - lengths.sum() / computed
    print(f"median {median}, sigma {sigma}, {'GPU' if pads else 'CPU'}: {len(buckets)} buckets, {share:.1%} padding")
    assert share < (0.105 if (median, sigma) == (12, 0.9) else 0.1)
    assert len(buckets) <= 25

"""Whether tokens that are put together from those of words are those that the library makes of whole texts.

    python scripts/compare_words.py [--seconds 60] [--seed 0]

First each character of Unicode in five places of a text, under three normalizers; then random texts, for --seconds,
by random tokenizers of BERT's kind, with added tokens of all sorts. Prints what differs, and ends with 1 if anything
does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from measuring import ROOT
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

sys.path.insert(0, str(ROOT))

from nimble_jobs.data.text.words import Words

PIECES = [*"abxqσςiesßfﬁ中国あいがк\u0301.-'[]<>#_1२א", "un", "able", "cafe", "the", "ss"]
NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ADDED = [
    "<b>",
    "qq",
    "中",
    "b中",
    "中b",
    "x",
    "Q",
    "é",
    "q\u0301",
    "[X]",
    "#",
    "ab",
    "ß",
    "İ",
    "σ",
    "<b",
    "_b_",
    ".",
    "1",
]
ODD = [
    *"ab xq.-'[]<>#_1ΣσςİıßẞÅåéÉﬁǅΐŉ中国﨑𠀀あガが한각ᄀאבעسلا२३😀\ufffd",
    *"\u0301\u0308\u0345\u200d\u200b\u00ad\ufeff\u0000\u0001\u001f\u0085\u00a0\u1680\u2003\u2028\u202f\u3000\t\n\r",
    *"\u000b\u000c\u001c\u180e\u202e\u0e33\u0f77\u0958\u1fef\u2126\u212b\u0344\u2000\ue000\ufdd0",
]
WORDS = ["[SEP]", "[MASK]", "<b>", "qq", "unable", "café", "ΣΑΣ", "x" * 100, "x" * 101, "é" * 101, "中" * 120, "b中"]


def tokenizer(normalizer: Any, added: list[AddedToken], chance: random.Random) -> Tokenizer:
    names = {name: i for i, name in enumerate(dict.fromkeys([*NAMES, *PIECES, *(f"##{piece}" for piece in PIECES)]))}
    longest = chance.choice([5, 100])
    word_piece = models.WordPiece(names, unk_token="[UNK]", max_input_chars_per_word=longest)
    made = Tokenizer(word_piece if chance.random() < 0.8 else models.WordLevel(names, unk_token="[UNK]"))
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(NAMES[:4])
    for token in added:
        (made.add_special_tokens if token.special else made.add_tokens)([token])
    return made


def random_tokenizer(chance: random.Random) -> Tokenizer:
    def half() -> bool:
        return chance.random() < 0.5

    own = normalizers.BertNormalizer(half(), half(), chance.choice([None, True, False]), half())
    normalizer = chance.choice([None, own, own, normalizers.Sequence([normalizers.Lowercase(), own])])
    added = [
        AddedToken(text, single_word=half(), lstrip=half(), rstrip=half(), normalized=half(), special=half())
        for text in chance.sample(["[MASK]", *ADDED], chance.randint(0, 5))
    ]
    return tokenizer(normalizer, added, chance)


def random_text(chance: random.Random) -> str:
    some = chance.choices([*ODD, *[" "] * 20], k=chance.randint(0, 14))
    return "".join(some if chance.random() < 0.7 else chance.choices([*ODD, *WORDS, *[" "] * 40], k=12))


def batches(seconds: float, chance: random.Random) -> Iterator[tuple[Tokenizer, list[str]]]:
    characters = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
    added = [AddedToken("qq", single_word=True), AddedToken("中", lstrip=True, rstrip=True), AddedToken("é")]
    for options in ({}, {"lowercase": False, "strip_accents": False, "clean_text": False}, {"strip_accents": False}):
        made = tokenizer(normalizers.BertNormalizer(**options), added, chance)
        for first in range(0, len(characters), 4096):
            yield made, [f"e{c} {c}qq {c}\u0301a a{c} {c}" for c in characters[first : first + 4096]]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield random_tokenizer(chance), [random_text(chance) for _ in range(400)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    texts = different = 0
    chance = random.Random(options.seed)
    for made, some in batches(options.seconds, chance):
        words = Words.of(made)
        assert words is not None
        limit, truncate = chance.randint(4, 24), chance.choice(["end", "start"])
        ids, lengths, cut = words(some, limit, truncate)  # type: ignore[arg-type]
        made.enable_truncation(limit, direction="right" if truncate == "end" else "left")
        whole = made.encode_batch(some)
        made.no_truncation()
        texts += len(some)
        expected = [one.ids for one in whole], [bool(one.overflowing) for one in whole]
        if (ids.tolist(), lengths.tolist(), cut.tolist()) != (
            list(chain.from_iterable(expected[0])),
            list(map(len, expected[0])),
            expected[1],
        ):
            different += 1
            print("differs:", made.to_str(), some, flush=True)
    print(f"{texts:,} texts, {different} batches with differences")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()

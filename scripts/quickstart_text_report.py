"""The end of the text quick start: each question with the three passages that are nearest to it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from quickstart_text_data import DATA

NEAREST = 3
_LEAST_COLUMNS, _MOST_COLUMNS = 60, 120


def embeddings(folder: Path) -> dict[str, np.ndarray]:
    """What the job published, by id; each has length 1."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])
    rows = np.stack(table["embedding"].to_numpy()).astype(np.float32)
    return dict(zip(table["id"].to_pylist(), rows, strict=True))


def nearest(vector: np.ndarray, others: np.ndarray) -> list[tuple[int, float]]:
    """Rows with the largest cosine, and their cosines."""
    cosines = others @ vector
    return [(int(row), float(cosines[row])) for row in np.argsort(-cosines)[:NEAREST]]


def lines(texts: list[dict[str, str]], vectors: dict[str, np.ndarray], columns: int) -> list[str]:
    """A question a paragraph, with its passages below, cut to the width of the terminal."""
    passages = [text for text in texts if text["package"] != "question"]
    matrix = np.stack([vectors[text["id"]] for text in passages])
    wide = max(len(text["package"]) for text in passages)
    found: list[str] = []
    for question in (text for text in texts if text["package"] == "question"):
        found += ["", question["text"]]
        for row, cosine in nearest(vectors[question["id"]], matrix):
            passage = passages[row]
            head = f"  {cosine:.2f}  {passage['package']:<{wide}}  "
            said = textwrap.shorten(passage["text"], columns - len(head), placeholder=" ...")
            found += [head + said, " " * len(head) + _short(passage["id"], columns - len(head))]
    return found


def _short(name: str, columns: int) -> str:
    """The end of a dotted name, which says most."""
    while len(name) > columns and "." in name:
        name = name.partition(".")[2]
    return name[:columns]


def main(out: str) -> int:
    """Print the table."""
    texts = pq.read_table(DATA / "passages.parquet").to_pylist()
    vectors = embeddings(Path(out))
    columns = shutil.get_terminal_size((100, 24)).columns
    print("\n".join(lines(texts, vectors, max(_LEAST_COLUMNS, min(_MOST_COLUMNS, columns)))))
    width = len(next(iter(vectors.values())))
    print(f"\nnearest of {len(vectors):,} embeddings of {width} numbers in {out}; the number is the cosine")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

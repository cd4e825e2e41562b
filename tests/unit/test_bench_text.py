"""`bench text`: texts, settings, loops, comparison of embeddings, peak memory; and a whole run with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nimble_jobs.bench.scoring.ours import Job
from nimble_jobs.bench.scoring.process import Ended
from nimble_jobs.bench.scoring.workshop import Workshop
from nimble_jobs.bench.text import (
    Recipe,
    TextResults,
    TextRow,
    TextSystem,
    TextTrial,
    TextWanted,
    agreement,
    compile_modes_of,
    corpus,
    driver,
    is_text,
    loops,
    models,
    prose,
    text_systems_of,
)
from nimble_jobs.bench.text.__main__ import count_tokens
from nimble_jobs.bench.text.loops.task import Task
from nimble_jobs.bench.text.peak import Peak
from nimble_jobs.bench.text.request import TextSetting
from nimble_jobs.errors import DataError, UsageError
from tests.waiting import until

SOURCES = Path(loops.__file__).parent
LOOPS = [system for system in TextSystem if not system.ours]
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny BERT and MiniLM's vocabulary."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    models.make_bert(folder, TINY)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 texts."""
    return corpus.provide(tmp_path_factory.mktemp("texts"), recipe(40), lambda _: None)


def recipe(count: int, **values: float) -> Recipe:
    return Recipe(**{"count": count, "median_words": 12.0, "packages": ("networkx",), **values})  # type: ignore[arg-type]


# ---- texts


@pytest.mark.parametrize(
    ("paragraph", "expected"),
    [
        (
            "Returns the :class:`~torch.nn.Linear` layer of `a graph <graph>`_, which\nis what **you** asked for.",
            "Returns the Linear layer of a graph, which is what you asked for.",
        ),
        ("Too short to say much.", None),
        (">>> nodes = graph(1)\n>>> so this is code and no prose at all, as everybody sees.", None),
        ("Parameters\n----------\nnodes of the graph are what this list of parameters is about.", None),
        ("nodes\n    These are the nodes of the graph, and there may be many of them.", None),
        (":param nodes: These are the nodes of the graph, and there may be many of them.", None),
        ("no capital at the beginning, so this is the rest of a list or of a table.", None),
    ],
)
def test_prose_is_told_from_code_and_tables(paragraph: str, expected: str | None) -> None:
    """Markup goes; what is not a sentence is left out."""
    assert prose.plain(paragraph) == expected


def test_passages_name_what_they_document() -> None:
    """Every paragraph once, with the dotted name of its object; nothing of a package that is not installed."""
    found = list(prose.passages("networkx"))
    name = "networkx.algorithms.shortest_paths.generic.shortest_path_length"
    assert any("path length from source to that target" in p.text for p in found if p.name == name)
    assert len({passage.text for passage in found}) == len(found) > 1000
    assert list(prose.passages("no_such_package")) == []


def test_texts_are_decided_by_the_seed(texts: Path, tmp_path: Path) -> None:
    """The same recipe makes the same texts, another seed others; a file that is there is used again."""
    again = corpus.provide(tmp_path, recipe(40), lambda _: None)
    other = corpus.provide(tmp_path, recipe(40, seed=1), lambda _: None)
    assert pq.read_table(again).equals(pq.read_table(texts))
    assert not pq.read_table(other).equals(pq.read_table(texts))
    before = again.stat().st_mtime_ns
    assert corpus.provide(tmp_path, recipe(40), lambda _: None) == again
    assert again.stat().st_mtime_ns == before


def test_lengths_are_log_normal() -> None:
    """Median and spread of the number of words are those asked for; every text is a run of whole words."""
    words = [f"w{number}" for number in range(50)]
    made = corpus.made(Recipe(count=4000, median_words=40, sigma=0.8), [words[:20], words[20:]])
    logs = np.log([len(text.split()) for text in made])
    assert np.exp(np.median(logs)) == pytest.approx(40, rel=0.1)
    assert logs.std() == pytest.approx(0.8, rel=0.1)
    assert all(set(text.split()) <= set(words) for text in made[:20])


# ---- what is asked for


def test_systems_and_modes_by_name() -> None:
    """Groups and names; mistakes say what is expected."""
    assert text_systems_of(None) == tuple(TextSystem)
    assert text_systems_of("ours") == (TextSystem.EMPTY, TextSystem.STORED)
    assert text_systems_of("eager-sorted,loops")[0] is TextSystem.EAGER
    with pytest.raises(UsageError, match="unknown system 'tei'; expected all, ours, loops, or of ours-empty-store"):
        text_systems_of("tei")
    assert compile_modes_of("default,reduce-overhead") == ("default", "reduce-overhead")
    with pytest.raises(UsageError, match="unknown mode 'fast'; expected of default, max-autotune-no-cudagraphs"):
        compile_modes_of("fast")


def test_what_is_tried_for_a_system() -> None:
    """Modes for the compiled loop alone; ours is used as it comes."""
    wanted = TextWanted(models=("minilm",), recipe=recipe(4), batch_sizes=(8, 16), modes=("default", "reduce-overhead"))
    assert len(wanted.settings(TextSystem.COMPILED)) == 4
    assert [str(setting) for setting in wanted.settings(TextSystem.EAGER)] == ["batch 8", "batch 16"]
    assert wanted.settings(TextSystem.STORED) == []


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """With the names that are known."""
    with pytest.raises(UsageError, match=r"expected minilm, bert-base, or a folder with a config\.json"):
        models.folder_of(str(tmp_path), tmp_path)


# ---- loops


@pytest.mark.parametrize("system", LOOPS)
def test_a_loop_has_at_most_forty_lines(system: TextSystem) -> None:
    """Blank ones not counted; and it starts no thread and makes no stream."""
    text = (SOURCES / f"{system.loop}.py").read_text()
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 40
    assert not any(word in text for word in ("threading", "Stream(", "concurrent", "multiprocessing"))


def test_loops_give_the_same_embeddings(
    tiny: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each embeds every text once, in any order of batches, a short last one too; padding is counted as it is."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    found, padded = {}, {}
    for system in LOOPS:
        task = Task(
            texts=str(texts),
            model=str(tiny),
            dtype=torch.float32,
            device="cpu",
            batch_size=16,
            max_length=64,
            mode="default",
            out=str(tmp_path / f"{system}.parquet"),
        )
        module = __import__(f"nimble_jobs.bench.text.loops.{system.loop}", fromlist=["embed"])
        module.embed(task)
        found[system], padded[system] = agreement.read(Path(task.out)), task.padded
        assert task.first_at is not None
    reference = found[TextSystem.EAGER]
    assert reference[0] == [f"text-{number:07d}" for number in range(40)]
    assert np.linalg.norm(reference[1], axis=1) == pytest.approx(1)
    assert {system: agreement.farthest(each, reference) < 1e-5 for system, each in found.items()} == dict.fromkeys(
        LOOPS, True
    )
    tokens = count_tokens(tiny, texts, 64)
    assert padded[TextSystem.PADDED] == 48 * 64  # the last batch is filled up
    assert tokens < padded[TextSystem.EAGER] < padded[TextSystem.PADDED]


# ---- figures


def embeddings(path: Path, ids: list[str], rows: np.ndarray) -> Path:
    lists = pa.array([list(map(float, row)) for row in rows], type=pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": ids, "embedding": lists}), path)
    return path


def test_embeddings_are_compared_by_id(tmp_path: Path) -> None:
    """Their order does not matter; other ids, other widths and NaN are infinitely far."""
    rows = np.eye(3, 4, dtype=np.float32) * 2
    one = agreement.read(embeddings(tmp_path / "a", ["a", "b", "c"], rows))
    folder = tmp_path / "parts"
    folder.mkdir()
    embeddings(folder / "1.parquet", ["c"], rows[2:])
    moved = rows[:2] + np.array([[0, 0, 0, 0.2], [0, 0, 0, 0]], np.float32)
    embeddings(folder / "2.parquet", ["b", "a"], moved[::-1])
    assert agreement.farthest(agreement.read(folder), one) == pytest.approx(0.1)
    broken = rows.copy()
    broken[1, 1] = np.nan
    for name, ids, other in (
        ("ids", ["a", "b", "d"], rows),
        ("width", ["a", "b", "c"], rows[:, :3]),
        ("nan", ["a", "b", "c"], broken),
    ):
        assert agreement.farthest(agreement.read(embeddings(tmp_path / name, ids, other)), one) == float("inf")
    (tmp_path / "text").write_text("no parquet")
    with pytest.raises(DataError, match="expected Parquet with id and embedding"):
        agreement.read(tmp_path / "text")


def test_peak_memory_counts_what_a_process_starts() -> None:
    """A child's 200 MB are in the figure of its parent."""
    grow = "import time; held = bytearray(200_000_000); held[::4096] = b'x' * len(held[::4096]); time.sleep(600)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grow!r}])"
    with Peak() as peak, subprocess.Popen([sys.executable, "-c", start], start_new_session=True) as process:
        peak.watch(process)
        until(lambda: peak.host_bytes > 200_000_000)
        subprocess.run(["kill", "--", f"-{process.pid}"], check=True)


def row(system: str, *walls: float, tokens: int = 1000) -> TextRow:
    trials = tuple(TextTrial(wall_s=wall, start_s=2.0, host_peak_bytes=int(wall), padded_tokens=1250) for wall in walls)
    return TextRow(model="minilm", system=system, dtype="fp32", device="cpu", texts=100, tokens=tokens, trials=trials)


def test_what_follows_from_the_trials(tmp_path: Path) -> None:
    """Rates of the whole process and after its start, padding, the best loop; a file gives back what it was given."""
    results = TextResults(
        environment={"device": "a CPU"}, rows=[row("ours-stored", 4.0), row("eager-sorted", 8.0, 12.0)]
    )
    ours, loop = results.rows
    assert (ours.texts_per_s, ours.tokens_per_s, ours.after_start) == (25, 250, 50)
    assert (loop.texts_per_s, loop.padding_share) == (10, pytest.approx(0.2))
    assert (results.over_best(ours), results.over_best(loop)) == (2.5, 1)
    path = tmp_path / "results.json"
    results.save(path)
    assert is_text(path)
    assert TextResults.load(path).rows == results.rows
    assert json.loads(path.read_text())["results"][1]["host_peak_bytes"] == 12
    path.write_text("{}")
    assert not is_text(path)
    with pytest.raises(UsageError, match="not results of bench text"):
        TextResults.load(path)


# ---- which systems are measured


def place(tmp_path: Path, texts: Path, *systems: TextSystem, rounds: int = 1, **named: Any) -> driver.Place:
    """A model that is not there: all processes are replaced."""
    wanted = TextWanted(models=("m",), recipe=recipe(40), systems=systems, rounds=rounds, **named)
    return driver.Place(
        wanted=wanted, model="m", folder=tmp_path, texts=texts, count=40, tokens=400, dtype="fp32", device="cpu"
    )


def shop(tmp_path: Path) -> Workshop:
    (tmp_path / "work").mkdir()
    return Workshop(folder=tmp_path / "work", home=tmp_path / "home", log=tmp_path / "log", limit_s=9.0)


def loop(run: object, system: TextSystem, setting: TextSetting, texts: Path) -> tuple[TextTrial, Path]:
    """A process that takes 3 s."""
    folder = texts.parent / str(system)
    folder.mkdir(exist_ok=True)
    embeddings(folder / "1.parquet", ["a", "b"], np.ones((2, 3)))
    return TextTrial(wall_s=3.0, start_s=1.0, host_peak_bytes=1, padded_tokens=500), folder


@pytest.mark.parametrize(
    ("hits", "note", "error"),
    [
        (["stored", "miss"], "schedules of 1 of 2 buckets were stored; building: over the time limit of 9 s", None),
        (
            ["miss", "miss"],
            None,
            "the schedules of 2 buckets were not found in the store; building: over the time limit of 9 s",
        ),
    ],
)
def test_what_was_built_within_the_limit_is_measured(
    hits: list[str],
    note: str | None,
    error: str | None,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row says what was missing, and the other systems are measured as well."""
    job = {
        "schedule": {"hit": "miss", "runs": "eager", "buckets": [{"hit": hit} for hit in hits], "key": "k"},
        "timings": {"run_s": 2.0, "text": {"tokens": 400, "padding_share": 0.2}},
    }

    def run(self: Job) -> tuple[dict[str, Any], Ended]:
        self.output.mkdir(parents=True)
        embeddings(self.output / "1.parquet", ["a", "b"], np.ones((2, 3)))
        return job, Ended(wall_s=4.0, out="", error=None)

    monkeypatch.setattr(Job, "build", lambda _: (None, "over the time limit of 9 s"))
    monkeypatch.setattr(Job, "run", run)
    monkeypatch.setattr(driver._Run, "_loop", loop)
    wanted = place(tmp_path, texts, TextSystem.STORED, TextSystem.EAGER, batch_sizes=(32,))
    ours, eager = driver.run(wanted, shop(tmp_path), lambda _: None)
    assert (ours.note, ours.error, len(ours.trials)) == (note, error, 0 if error else 1)
    assert (eager.note, eager.error, len(eager.trials)) == (None, None, 1)


def test_each_round_without_schedules_begins_without_anything(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its state nor its output: a state folder replaces no output that it does not know."""
    job = {
        "schedule": {"hit": "miss", "runs": "eager", "buckets": [], "key": "k"},
        "timings": {"run_s": 2.0, "text": {"tokens": 400, "padding_share": 0.2}},
    }

    def run(self: Job) -> tuple[dict[str, Any], Ended]:
        self.output.mkdir(parents=True)
        (self.shop.home / "state").touch(exist_ok=False)
        embeddings(self.output / "1.parquet", ["a", "b"], np.ones((2, 3)))
        return job, Ended(wall_s=4.0, out="", error=None)

    monkeypatch.setattr(Job, "run", run)
    wanted = place(tmp_path, texts, TextSystem.EMPTY, rounds=3)
    (ours,) = driver.run(wanted, shop(tmp_path), lambda _: None)
    assert (ours.error, len(ours.trials)) == (None, 3)


def test_a_mode_that_takes_too_long_is_not_tried_again(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with other batch sizes; other modes are."""

    def slow(run: object, system: TextSystem, setting: TextSetting, few: Path) -> tuple[TextTrial, Path]:
        if setting.mode == "default":
            raise driver.TooSlow("over the time limit of 9 s")
        return loop(run, system, setting, few)

    monkeypatch.setattr(driver._Run, "_loop", slow)
    modes = ("default", "reduce-overhead")
    wanted = place(tmp_path, texts, TextSystem.COMPILED, batch_sizes=(32, 64), modes=modes)
    (found,) = driver.run(wanted, shop(tmp_path), lambda _: None)
    assert [line.get("error") for line in found.searched] == [
        "over the time limit of 9 s",
        "not tried: batch 32: over the time limit of 9 s",
        None,
        None,
    ]
    assert found.compile_mode == "reduce-overhead"

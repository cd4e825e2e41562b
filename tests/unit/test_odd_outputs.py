"""Jobs whose model returns what is no plain array of numbers, a row for each record."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_jobs import spec as specs
from nimble_jobs.data.records import TokenRows
from nimble_jobs.job import Job, JobState
from nimble_jobs.models.classes import Classes
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.views import jobs as job_view
from nimble_jobs.worker.executor import real_station
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.workloads.collected import Wanted
from nimble_jobs.workloads.columns import Columns
from nimble_jobs.workloads.heads import Heads
from nimble_jobs.workloads.look import look
from tests.store_samples import queued
from tests.unit.test_workloads_state import interrupted

RECORDS, SHARD, BATCH = 12, 4, 2


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def submit(store: Store, folder: Path, body: str, fields: list[str], format_: str = "jsonl") -> Job:
    """A job whose model computes `body` of x [batch, 3], the record's number in the first column."""
    model = f"import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        {body}\n"
    (folder / "model.py").write_text(f"{model}\ndef make():\n    return Model()\n")
    x = np.ones((RECORDS, 3), dtype=np.float32)
    x[:, 0] = np.arange(RECORDS)
    ids = np.array([f"r{i}" for i in range(RECORDS)])
    np.savez(folder / "x.npz", x=x, ids=ids)
    spec = {
        "version": 1,
        "name": "odd",
        "kind": "score",
        "model": {"source": f"python:{folder}/model.py:make"},
        "input": {
            "source": str(folder / "x.npz"),
            "format": "npz",
            "fields": {"x": "x", "id": "ids"},
            "batch_size": BATCH,
        },
        "schedule": {"on_miss": "eager"},
        "output": {"path": str(folder / "out"), "format": format_, "fields": fields, "shard_size": SHARD},
        "run": {"device": "cpu"},
    }
    return queued(
        store,
        spec=specs.dump(specs.restore(spec)),
        name="odd",
        kind="score",
        foreground=True,
        allow_python=[str(folder)],
        now=time.time(),
    )


def ended(store: Store, job: Job) -> Job:
    return run_inline(store, job.id, station=real_station(store, "w", "cpu", None))


SCORES = """y = x * 1.0
        for record, value in {3: float('nan'), 6: float('nan'), 10: float('inf')}.items():
            y = torch.where(x[:, :1] == record, value, y)
        return {"logits": y, "size": x[:, 0], "place": y.double()[:, 1:]}"""


@pytest.mark.parametrize(("fields", "told"), [(["id", "logits", "size"], ["logits"]), (["top1", "top5"], ["top1"])])
def test_outputs_that_are_not_finite_are_counted(
    store: Store, tmp_path: Path, fields: list[str], told: list[str]
) -> None:
    """The job succeeds, and says for how many records, and for which first; also where scores are only ranked."""
    job = ended(store, submit(store, tmp_path, SCORES, fields))
    assert job.state is JobState.SUCCEEDED, job.error
    expected = {field: {"records": 3, "first": "r3"} for field in told}
    assert job.outputs["not_finite"] == expected
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["not_finite"] == expected
    [event] = [event for event in store.jobs.events(job.id) if event.kind == "not-finite"]
    assert event.message == f"{told[0]} has NaN or infinity for 3 records; the first is r3"
    assert f"NaN or infinity in {told[0]}" in job_view.summary(job)


def test_finite_outputs_are_not_spoken_of(store: Store, tmp_path: Path) -> None:
    """Neither in the manifest nor in what the job says of itself."""
    job = ended(store, submit(store, tmp_path, SCORES, ["id", "size"]))
    assert "not_finite" not in job.outputs
    assert "not_finite" not in json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert "NaN" not in job_view.summary(job)


def test_what_an_earlier_attempt_found_is_counted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards are kept, so the next attempt does not see their outputs."""
    job = submit(store, tmp_path, SCORES, ["id", "logits"])
    interrupted(monkeypatch, store, job, 2)
    job = ended(store, job)
    assert job.state is JobState.SUCCEEDED, job.error
    assert job.outputs["not_finite"] == {"logits": {"records": 3, "first": "r3"}}


def test_values_of_padding_do_not_count() -> None:
    """A row or a token that is not there may have any value."""
    tokens = TokenRows(lengths=np.array([2, 1]), shortened=np.zeros(2, dtype=bool))
    scores = torch.zeros(3, 2, 4)
    scores[2] = torch.nan  # a row beyond the records
    scores[1, 1] = torch.nan  # beyond the second record's one token
    classes = Classes(names=("a", "b", "c", "d"))
    for fields in (["token_labels"], ["token_labels", "token_probabilities"]):
        made = Heads.of(fields, classes)({"logits": scores})
        assert not Columns(fields, classes.names).add(made, ["a", "b"], None, tokens)
    scores[1, 0] = torch.nan
    for fields in (["token_labels"], ["token_probabilities"]):
        made = Heads.of(fields, classes)({"logits": scores})
        found = Columns(fields, classes.names).add(made, ["a", "b"], None, tokens)
        assert {name: rows.tolist() for name, rows in found.items()} == {fields[0]: [1]}


@pytest.mark.parametrize("fields", [["top1", "probability"], ["top1", "probabilities"]])
def test_a_sigmoid_hides_infinity(fields: list[str]) -> None:
    """A multi-label model gives a probability of 1 for an infinite score; a softmax gives NaN."""
    scores = torch.tensor([[0.0, 1.0], [torch.inf, 0.0]])
    for multi_label, told in ((True, "top1"), (False, fields[1])):
        classes = Classes(names=("a", "b"), multi_label=multi_label)
        made = Heads.of(fields, classes)({"logits": scores})
        assert list(Columns(fields).add(made, ["a", "b"], None)) == [told]


def test_scores_are_looked_at_once() -> None:
    """If the ranked output is itself a field, that field tells of a bad record. Tokens' scores are converted once."""
    made = Heads.of(["top1", "output"])({"output": torch.tensor([[0.0, torch.nan]])})
    assert list(made) == ["top1", "output"]
    assert list(Columns(["top1", "output"]).add(made, ["a"], None)) == ["output"]
    scores, classes = torch.zeros(1, 2, 3, dtype=torch.float16), Classes(names=("a", "b", "c"))
    with _Conversions() as conversions:
        assert len(Heads.of(["token_labels"], classes)({"logits": scores})) == 2
    assert conversions.seen == 1


class _Conversions(TorchDispatchMode):
    """Counts conversions to another type."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_outputs_that_have_the_names_of_ranks() -> None:
    """Nothing is known of the scores of a model that names classes itself."""
    own: dict[str, Any] = {"token_labels": torch.zeros(2, 3), "top1_label": torch.zeros(2)}
    made = Heads.of(["token_labels", "top1_label"])(own)
    assert made == own


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ("return {'z': torch.fft.fft(x)}", "z", "'z' is complex64 [2, 3]; expected a plain tensor of real numbers"),
        ("return torch.fft.fft(x)", "top1", "'logits' is complex64 [2, 3]; expected a plain tensor of real numbers"),
        ("return {'z': x.to_sparse()}", "z", "'z' is a sparse tensor of shape [2, 3]; expected a plain tensor"),
        ("return {'z': torch.nested.nested_tensor(list(x), layout=torch.jagged)}", "z", "'z' is a nested tensor; exp"),
        ("return {'z': x[:, :0]}", "z", "'z' has shape [2, 0]; expected at least one value for each record"),
        ("return x[:, :0]", "top1", "'logits' has shape [2, 0]; expected at least one value for each record"),
        (
            "return {'z': x[:, :1 + int(x[0, 0]) // 2 % 2]}",
            "z",
            "'z' has shape [2] for records of this batch and [1] for those of an earlier batch; expected one shape",
        ),
        (
            "return {'z': x[:, :1 + int(x[0, 0]) // 4 % 2]}",
            "z",
            "'z' has shape [2] for records of this batch and [1] for those of an earlier batch; expected one shape",
        ),
    ],
    ids=["complex", "complex scores", "sparse", "nested", "empty", "no classes", "another width", "in another shard"],
)
def test_outputs_that_are_no_rows_of_numbers(store: Store, tmp_path: Path, body: str, field: str, said: str) -> None:
    """The job fails and names the output, its shape or type, and what was expected."""
    job = ended(store, submit(store, tmp_path, body, ["id", field], "parquet"))
    assert job.state is JobState.FAILED
    assert str(job.error).startswith(f"output.fields: {said}"), job.error


@pytest.mark.parametrize(
    ("made", "what", "now", "before"), [("x[:, :2]", "shape", [2], [3]), ("x.int()", "type", "int32", "float32")]
)
def test_outputs_unlike_those_of_an_earlier_attempt(
    made: str, what: str, now: object, before: object, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may depend on what is not in its identity, such as a variable of the environment: nothing is mixed."""
    job = submit(store, tmp_path, f"return {{'z': {made} if 'NOW' in __import__('os').environ else x}}", ["z"], "npy")
    interrupted(monkeypatch, store, job, 1)
    monkeypatch.setenv("NOW", "1")
    job = ended(store, job)
    assert job.state is JobState.FAILED
    assert str(job.error).startswith(
        f"output.fields: 'z' has {what} {now} for records of this batch and {before} for those of shard 0, which "
        "another attempt or device wrote; expected one"
    )


def test_a_form_is_a_plain_value() -> None:
    """What shards have shown is kept by the job that scores them."""
    assert len({Wanted(fields=("z",)), Wanted(fields=("z",))}) == 1


def test_types_that_numpy_does_not_know_become_float32() -> None:
    """As few readers know them."""
    x = torch.tensor([[0.5], [2.0]]).to(torch.float8_e4m3fn)
    columns = Columns(["z"])
    columns.add({"z": x}, ["a", "b"], None)
    found = np.asarray(columns.finish()["z"])
    assert (found.dtype, found.tolist()) == (np.float32, [[0.5], [2.0]])


def test_scores_are_not_guessed(store: Store, tmp_path: Path) -> None:
    """Of several outputs of the shape of scores only `logits` is taken; `validate --data` says the same as the job."""
    job = submit(store, tmp_path, "return x, x[:, :2]", ["id", "top1"])
    said = (
        "output.fields: top1, top5, probability and logits need scores of shape [batch, classes], and any of output.0 "
        "[2, 3], output.1 [2, 2] may be meant; expected one output of this shape, or one named 'logits'; or name an "
        "output itself in output.fields"
    )
    assert look(specs.restore(job.spec), (tmp_path,)).problems == [said]
    assert ended(store, job).error == said
    outputs = {"features": torch.zeros(2, 7), "logits": torch.eye(2)}
    assert Heads.of(["top1"])(outputs)["top1"].tolist() == [0, 1]
    assert Heads.of(["top1"])({"scores": torch.eye(2), "size": torch.ones(2)})["top1"].tolist() == [0, 1]

"""What a newcomer meets first: specs on standard input, code that was not allowed, ids that are too short, mistakes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nimble_jobs.worker.logs import job_log_path
from tests.bad_specs import FINETUNE, SCORE, lay_out
from tests.cli import Cli


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Commands that run from a folder with the files that the specs name."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIMBLE_JOBS_ALLOW_PYTHON", raising=False)
    return Cli(tmp_path / "home", capsys)


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Have standard input hold this."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


PYTHON = SCORE.replace("torchvision:resnet18", "python:net.py:make").replace("args: {num_classes: 10}", "seed: 0")


def test_a_spec_comes_on_standard_input(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` stands for it; relative paths are relative to the current folder."""
    typed(monkeypatch, SCORE)
    job = cli("submit", "-", "input.batch_size=8")
    assert job.code == 0
    spec = cli("show", job.out.strip(), "--json").json["spec"]
    assert (spec["input"]["source"], spec["input"]["batch_size"]) == (str(tmp_path / "digits.npz"), 8)
    typed(monkeypatch, SCORE)
    assert cli("validate", "-").lines == ["<stdin>: valid"]


@pytest.mark.parametrize("command", ["submit", "run", "validate", "explain"])
def test_mistakes_on_standard_input_have_lines(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Messages say `<stdin>:LINE`; what is too large or closed is refused."""
    typed(monkeypatch, SCORE.replace("npz\n  fields", "npy2\n  fields"))
    answer = cli(command, "-")
    assert (answer.code, answer.out) == (2, "")
    assert answer.lines[0].startswith("<stdin>:9: input.format: found 'npy2'")
    typed(monkeypatch, SCORE + "#" * (1 << 20))
    assert cli(command, "-").lines == ["<stdin>: larger than 1 MiB; expected a job spec in YAML"]
    monkeypatch.setattr("sys.stdin", None)
    assert cli(command, "-").lines == ["<stdin>: cannot be read (it is closed); expected a job spec in YAML"]


@pytest.mark.parametrize("command", [["submit"], ["submit", "--dry-run"], ["run"], ["explain"], ["cache", "build"]])
def test_python_must_be_allowed_when_a_spec_is_given(cli: Cli, tmp_path: Path, command: list[str]) -> None:
    """Every command that would run the file exits with 2, naming the flag and the folder; no job is made."""
    (tmp_path / "net.py").write_text("")
    spec = tmp_path / "job.yaml"
    spec.write_text(PYTHON)
    answer = cli(*command, spec)
    assert (answer.code, answer.out) == (2, "")
    assert answer.lines == [
        f"nimble-jobs: model.source: {tmp_path}/net.py may not be run; "
        f"allow its folder with --allow-python {tmp_path} or NIMBLE_JOBS_ALLOW_PYTHON={tmp_path}"
    ]
    assert cli("ls", "--json").json == []


def test_a_loss_must_be_allowed_too(cli: Cli, tmp_path: Path) -> None:
    """The file of a user's own loss is code like a model's; both are named at once."""
    (tmp_path / "other").mkdir()
    (tmp_path / "net.py").write_text("")
    (tmp_path / "other" / "loss.py").write_text("")
    spec = tmp_path / "job.yaml"
    spec.write_text(
        FINETUNE.replace("torchvision:resnet18", "python:net.py:make") + "  loss: python:other/loss.py:loss\n"
    )
    assert [line.split(": ")[1] for line in cli("submit", spec).lines] == ["model.source", "train.loss"]
    allowed = cli("submit", spec, "--allow-python", tmp_path)
    assert allowed.code == 0


def test_a_short_id_says_how_long_it_must_be(cli: Cli, tmp_path: Path) -> None:
    """`show 2n` tells that four characters are needed; what can be no id does not."""
    assert cli("show", "2n").lines == [
        "nimble-jobs: job 2n: no such id or name; a shortened id needs at least 4 characters; "
        "list jobs with: nimble-jobs ls"
    ]
    assert "4 characters" not in cli("show", "no").err
    assert cli("show", "2n").code == 102
    assert (
        "a shortened key needs at least 4 characters; list schedules with: nimble-jobs cache ls"
        in cli("cache", "show", "ab").err
    )
    assert "4 characters" not in cli("cache", "show", "abcd").err


def scored(cli: Cli, folder: Path, text: str) -> Path:
    """A small job over a model of this text; its spec."""
    (folder / "net.py").write_text(text)
    np.save(folder / "x.npy", np.ones((4, 3), dtype=np.float32))
    spec = folder / "small.yaml"
    spec.write_text(
        "version: 1\nname: small\nkind: score\nmodel: {source: 'python:net.py:make', seed: 7}\n"
        "input: {source: x.npy, format: npy, batch_size: 4}\noutput: {path: out/small, fields: [id, top1]}\n"
        "schedule: {on_miss: eager}\nrun: {device: cpu}\n"
    )
    return spec


def test_a_users_mistake_is_one_line_in_the_log(cli: Cli, tmp_path: Path) -> None:
    """A message that says all has no traceback beneath it; what nobody foresaw has one."""
    spec = scored(cli, tmp_path, "import torch\ndef make(width):\n    return torch.nn.Linear(3, 2)\n")
    cli("run", spec, "--allow-python", tmp_path, "--quiet")
    (job,) = cli("ls", "--json").json
    log = job_log_path(cli.home, job["id"]).read_text()
    assert "model.args: make in" in log
    assert "Traceback" not in log
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x + {}['a']\n"
        "def make():\n    return Net()\n"
    )
    cli("run", spec, "--allow-python", tmp_path, "--quiet")
    newest = cli("ls", "--json").json[0]
    assert "Traceback" in job_log_path(cli.home, newest["id"]).read_text()


def test_ls_says_where_errors_are_told(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, with the ids of the jobs that have any; nothing where there are none, or for machines."""
    spec = scored(cli, tmp_path, "import torch\ndef make(width):\n    return torch.nn.Linear(3, 2)\n")
    monkeypatch.setattr("nimble_jobs.cli.output.on_terminal", lambda: True)
    assert "errors" not in cli("ls").err
    cli("run", spec, "--allow-python", tmp_path, "--quiet")
    (job,) = cli("ls", "--json").json
    assert f"errors in {job['id']}; see them with: nimble-jobs show ID" in cli("ls").lines
    assert cli("ls", "--json").err == ""


def test_random_weights_are_announced(cli: Cli, tmp_path: Path) -> None:
    """On the job, in `show`, and beside `run`: a forgotten `model.weights` must not pass for a result."""
    spec = scored(cli, tmp_path, "import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    answer = cli("run", spec, "--allow-python", tmp_path)
    assert answer.code == 0, answer.err
    assert "weights: as make() returned them, with seed 7; set model.weights to use trained ones" in answer.lines
    (job,) = cli("ls", "--json").json
    said = [e["message"] for e in cli("show", job["id"], "--json").json["events"] if e["kind"] == "weights"]
    assert said == ["as make() returned them, with seed 7"]
    assert "job.weights: as make() returned them, with seed 7" in cli("show", job["id"]).out.splitlines()


TOKENS = (
    "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.words = torch.nn.Embedding(50, 8)\n        self.out = torch.nn.Linear(8, 3)\n"
    "    def forward(self, x):\n        return self.out(self.words(x).mean(1))\ndef make():\n    return Net()\n"
)


@pytest.mark.parametrize("on_miss", ["eager", "build"])
def test_a_token_beyond_the_vocabulary_names_its_record(cli: Cli, tmp_path: Path, on_miss: str) -> None:
    """Id, file, value and bound; with a threshold it is one bad record and the others are scored."""
    spec = scored(cli, tmp_path, TOKENS)
    tokens = np.random.default_rng(0).integers(0, 50, (6, 20))
    tokens[2, 7] = 50
    np.savez(tmp_path / "t.npz", x=tokens, ids=np.array(list("abcdef")))
    told = ["input.source=t.npz", "input.format=npz", "input.fields.id=ids", f"schedule.on_miss={on_miss}"]
    answer = cli("run", spec, "--allow-python", tmp_path, "--quiet", *told)
    assert answer.code == 100
    why = f"{tmp_path}/t.npz: record 2: holds 50 at [7]; expected 0 to 49: the model looks it up in a table of 50 rows"
    assert f"the last one is c: {why}" in answer.err
    assert cli("run", spec, "--allow-python", tmp_path, "--quiet", *told, "run.error_threshold=0.5").code == 0
    (job, _) = cli("ls", "--json").json
    assert (job["records_bad"], job["records_done"]) == (1, 6)


def test_a_failed_job_says_what_was_wrong_with_its_records(cli: Cli, tmp_path: Path) -> None:
    """Kinds, counts and the first place, though it published no file of errors; and so does a job that succeeded."""
    spec = scored(cli, tmp_path, "import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    x = np.ones((40, 3), dtype=np.float32)
    x[[5, 6, 30]] = np.nan
    np.save(tmp_path / "holes.npy", x)
    place = f"{tmp_path}/holes.npy: record 5"
    for threshold, code, state in ((0.0, 100, "failed"), (0.5, 0, "succeeded")):
        told = ["input.source=holes.npy", f"run.error_threshold={threshold}", "output.if_exists=replace"]
        assert cli("run", spec, "--allow-python", tmp_path, "--quiet", *told).code == code
        row = cli("ls", "--json").json[0]
        shown = cli("show", row["id"], "--json").json
        (kind,) = shown["bad_kinds"]
        assert (shown["state"], kind["first"], kind["count"]) == (state, place, shown["records_bad"])
        assert "NaN" in kind["reason"]
        assert shown["attempts"][-1]["bad_kinds"] == [kind]
        assert f"{kind['reason']}; first: {place}" in cli("show", row["id"]).out
    assert kind["count"] == 3


def test_a_training_names_the_record_out_of_range(cli: Cli, tmp_path: Path) -> None:
    """A token in the input, a label in the input, a label in the validation: each with its record and its bounds."""
    spec = scored(cli, tmp_path, TOKENS)
    spec.write_text(
        spec.read_text().replace("kind: score", "kind: finetune").replace("fields: [id, top1]", "if_exists: replace")
        + "train: {epochs: 1, loss: cross_entropy, optimizer: {name: sgd, lr: 0.1}}\n"
    )
    draw = np.random.default_rng(0)
    good, labels = draw.integers(0, 50, (8, 20)), draw.integers(0, 3, 8)
    told = ["input.source=t.npz", "input.format=npz", "input.fields.label=y", "--allow-python", str(tmp_path)]

    def failed(x: np.ndarray, y: np.ndarray) -> str:
        np.savez(tmp_path / "t.npz", x=x, y=y)
        answer = cli("run", spec, "--quiet", *told)
        assert answer.code == 100
        return answer.err

    wrong = good.copy()
    wrong[6, 1] = -1
    assert f"input.source: record 6 ({tmp_path}/t.npz: record 6) holds -1 at [1]; expected 0 to 49" in failed(
        wrong, labels
    )
    beyond = labels.copy()
    beyond[5] = 3
    place = f"{tmp_path}/t.npz: record 5"
    assert f"input.fields.label: found the label 3 of record 5 ({place}); expected 0 to 2" in failed(good, beyond)


@pytest.mark.parametrize("kind", ["score", "finetune"])
def test_what_cannot_be_checked_is_said(cli: Cli, tmp_path: Path, kind: str) -> None:
    """A model that refuses random token ids may take the real ones: the job goes on, and an event says so."""
    begins = "    def forward(self, x):\n"
    spec = scored(cli, tmp_path, TOKENS.replace(begins, f"{begins}        x[0, 0].item() == 7 or 1 / 0\n"))
    tokens = np.random.default_rng(0).integers(0, 50, (8, 20))
    tokens[:, 0] = 7
    np.savez(tmp_path / "t.npz", x=tokens, y=np.arange(8) % 3)
    text = spec.read_text()
    if kind == "finetune":
        text = text.replace("kind: score", "kind: finetune").replace(", fields: [id, top1]", "")
        text += "train: {epochs: 1, loss: cross_entropy, optimizer: {name: sgd, lr: 0.1}}\n"
    spec.write_text(text)
    told = ["input.source=t.npz", "input.format=npz", "input.fields.label=y"]
    answer = cli("run", spec, "--allow-python", tmp_path, "--quiet", *told)
    assert answer.code == 0, answer.err
    (job,) = cli("ls", "--json").json
    events = cli("show", job["id"], "--json").json["events"]
    (said,) = [event["message"] for event in events if event["kind"] == "unchecked"]
    assert said.startswith("the input is not checked for out-of-range numbers: ")
    assert [event["kind"] for event in events].count("weights") == 1


def test_validate_looks_at_the_data(cli: Cli, tmp_path: Path) -> None:
    """`--data` opens the input, reads a record, resolves the device and runs the model on shapes alone."""
    spec = scored(cli, tmp_path, "import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    allow = ("--allow-python", str(tmp_path))
    assert cli("validate", spec, "--data").code == 2  # the model's file may not be run
    seen = cli("validate", spec, "--data", *allow, "--json").json
    assert seen["problems"] == []
    assert {name: seen["data"][name] for name in ("records", "record", "first", "parameters", "outputs")} == {
        "records": 4,
        "record": "float32 [3]",
        "first": f"0 ({tmp_path}/x.npy: record 0)",
        "parameters": 8,
        "outputs": "output [4, 2]",
    }
    answer = cli("validate", spec, "--data", *allow)
    assert (answer.code, answer.lines) == (0, [f"{spec}: valid"])
    assert "data.outputs: output [4, 2]" in answer.out.splitlines()


def test_validate_data_looks_at_the_fields_that_the_job_writes(cli: Cli, tmp_path: Path) -> None:
    """Classes come from the scores, not from an output of their name, and the embedding from inside of the model."""
    text = (
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.last = torch.nn.Linear(3, 2)\n    def forward(self, x):\n"
        "        return {'output': self.last(x), 'top1': x.sum()}\ndef make():\n    return Net()\n"
    )
    spec = scored(cli, tmp_path, text)
    words = (spec, "output.fields=[id,top1,embedding]")
    answer = cli("validate", *words, "--data", "--allow-python", str(tmp_path))
    assert (answer.code, answer.lines) == (0, [f"{spec}: valid"])
    assert cli("run", *words, "--allow-python", str(tmp_path)).code == 0


def test_validate_data_counts_the_rows_of_outputs(cli: Cli, tmp_path: Path) -> None:
    """A field needs one for each record."""
    double = "class Double(torch.nn.Module):\n    def forward(self, x):\n        return torch.cat([x, x])\n"
    spec = scored(cli, tmp_path, f"import torch\n{double}def make():\n    return Double()\n")
    asked = ("validate", spec, "output.fields=[id,output]", "--data", "--allow-python", str(tmp_path))
    answer = cli(*asked)
    assert answer.code == 2
    assert "output.fields: 'output' has shape [8, 3] for 4 records; expected one row per record" in answer.err
    by_class = cli("validate", spec, "output.fields=[id,top1]", "--data", "--allow-python", str(tmp_path))
    assert "output.fields: 'top1' has shape [8] for 4 records; expected one row per record" in by_class.err
    unknown = cli("validate", spec, "output.fields=[id,mask]", "--data", "--allow-python", str(tmp_path))
    assert "output.fields: the model returns no 'mask'; it returns output" in unknown.err
    refused = cli("run", spec, "output.fields=[id,output]", "--allow-python", str(tmp_path))
    assert refused.code == 100
    assert "the model returns shape [8, 3] for a batch of records; expected one row per record" in refused.err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.source=torchvision:resnet81",
            "model.source: torchvision has no model 'resnet81'",
        ),
        ("model.args={width: 3}", "model.args: make in"),
        ("run.device=cuda:63", "run.device: cuda:63 "),
        ("input.source=wide.npy", "input.fields.x: the model cannot take a batch of float32 [4, 5]: RuntimeError"),
        ("input.source=text.npy", "input.fields.x: holds text; expected numbers"),
    ],
)
def test_validate_finds_what_does_not_fit(cli: Cli, tmp_path: Path, override: str, message: str) -> None:
    """Each ends with exit code 2 and one line; what could be looked at is printed all the same."""
    spec = scored(cli, tmp_path, "import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    np.save(tmp_path / "wide.npy", np.ones((4, 5), dtype=np.float32))
    np.save(tmp_path / "text.npy", np.array(["a", "b"]))
    answer = cli("validate", spec, "--data", "--allow-python", str(tmp_path), override)
    assert answer.code == 2
    assert len(answer.lines) == 1
    assert message in answer.err
    assert "data." in answer.out


@pytest.mark.parametrize(
    "layers",
    [
        "Linear(3, 2)",
        "Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))",
        "Sequential(nn.Unflatten(1, (3, 1)), nn.PReLU())",
    ],
)
@pytest.mark.parametrize(("kind", "given"), [("uint8", "uint8, given as int64"), ("int64", "int64")])
def test_whole_numbers_for_a_model_of_fractions_are_refused_with_the_remedy(
    cli: Cli, tmp_path: Path, layers: str, kind: str, given: str
) -> None:
    """`validate --data` and `run` name field, types and setting, with which both work."""
    spec = scored(cli, tmp_path, f"from torch import nn\ndef make():\n    return nn.{layers}\n")
    np.save(tmp_path / "x.npy", np.ones((4, 3), dtype=kind))
    for command in (("validate", "--data"), ("run", "--quiet")):
        told = (*command, spec, "output.fields=[id,output]", "--allow-python", tmp_path)
        answer = cli(*told)
        assert answer.code == (2 if command[0] == "validate" else 100)
        assert f"input.fields.x: the model computes in float32 and refuses whole numbers ({given}): " in answer.err
        assert answer.lines[-1].endswith("; if it wants fractions, set input.transform.scale: 1")
        assert cli(*told, "input.transform.scale=1").code == 0


def test_whole_numbers_of_a_training_are_refused_with_the_remedy(cli: Cli, tmp_path: Path) -> None:
    """`run` and `explain` both name it."""
    spec = scored(cli, tmp_path, "import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    spec.write_text(
        spec.read_text().replace("kind: score", "kind: finetune").replace(", fields: [id, top1]", "")
        + "train: {epochs: 1, loss: cross_entropy, optimizer: {name: sgd, lr: 0.1}}\n"
    )
    np.savez(tmp_path / "t.npz", x=np.ones((4, 3), dtype=np.int64), y=np.arange(4) % 2)
    told = ["input.source=t.npz", "input.format=npz", "input.fields.label=y", "--allow-python", tmp_path, "--quiet"]
    for command in ("run", "explain"):
        answer = cli(command, spec, *told)
        assert answer.code == 100
        assert "input.fields.x: the model computes in float32 and refuses whole numbers (int64): " in answer.err
    assert cli("run", spec, *told, "input.transform.scale=1").code == 0


@pytest.mark.parametrize("kind", ["score", "finetune"])
def test_a_device_that_cannot_decode_is_refused_before_a_job_runs(cli: Cli, tmp_path: Path, kind: str) -> None:
    """By the commands that look at data and device, in the words of `run`."""
    spec = scored(
        cli, tmp_path, "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(48, 2))\n"
    )
    told = ["input.source=pictures", "input.format=images", "input.decode=gpu", "run.device=auto"]
    if kind == "finetune":
        spec.write_text(
            spec.read_text().replace("kind: score", "kind: finetune").replace(", fields: [id, top1]", "")
            + "train: {epochs: 1, loss: cross_entropy, optimizer: {name: sgd, lr: 0.1}}\n"
        )
        told.append("input.fields.label=parent")
    for name in ("a", "b"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "pictures" / name / "0.png")
    for command in (("explain",), ("cache", "build"), ("cache", "why"), ("validate", "--data"), ("run", "--quiet")):
        allow = [] if command == ("cache", "why") else ["--allow-python", tmp_path]
        answer = cli(*command, spec, *told, *allow)
        assert answer.code in (2, 100)
        assert "input.decode: found gpu, but the job runs on the CPU" in answer.err, command


def test_an_embedding_takes_whole_numbers(cli: Cli, tmp_path: Path) -> None:
    """They stay whole for it, and `validate --data` does not object."""
    spec = scored(cli, tmp_path, TOKENS)
    np.save(tmp_path / "x.npy", np.ones((4, 20), dtype=np.uint8))
    for command in (("validate", "--data"), ("run", "--quiet")):
        assert cli(*command, spec, "--allow-python", tmp_path).code == 0


def test_a_model_that_needs_values_is_not_refused(cli: Cli, tmp_path: Path) -> None:
    """What shapes alone cannot tell is said, and is no mistake."""
    spec = scored(
        cli,
        tmp_path,
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        return x if x.sum().item() > 0 else -x\ndef make():\n    return Net()\n",
    )
    seen = cli("validate", spec, "--data", "--allow-python", str(tmp_path), "--json").json
    assert seen["problems"] == []
    assert seen["data"]["shapes"].startswith("not checked: the model needs values, not only shapes: ")

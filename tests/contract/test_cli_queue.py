"""What an operator does with the queue from the command line: retry, hold, release, groups, arrays."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store
from tests.bad_specs import SCORE, lay_out
from tests.cli import Cli
from tests.store_samples import submit


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path)
    (tmp_path / "job.yaml").write_text(SCORE)
    return Cli(tmp_path / "home", capsys)


def take(store: Store) -> Job:
    job = store.jobs.claim("w", device="cpu", now=time.time())
    assert job is not None
    return job


def fail(store: Store) -> Job:
    job = take(store)
    store.jobs.fail(job.id, job.attempt, error="no such file", retry=False, lost=False, now=time.time())
    return store.jobs.get(job.id)


def lines_file(folder: Path, *changes: dict[str, object]) -> Path:
    """A file with a spec a line, each with an output of its own and these changes."""
    path = folder / "jobs.jsonl"
    path.write_text("".join(f"{json.dumps(line(folder, n) | each)}\n" for n, each in enumerate(changes)))
    return path


def line(folder: Path, n: int) -> dict[str, object]:
    return {
        "version": 1,
        "name": f"part-{n}",
        "kind": "score",
        "model": {"source": "torchvision:resnet18"},
        "input": {"source": str(folder / "digits.npz"), "format": "npz"},
        "output": {"path": f"out/{n}"},
    }


def test_retry(cli: Cli) -> None:
    """A failed job is queued again with fresh attempts and its history; those that waited for it are named."""
    with cli.store() as store:
        submit(store, "parent", now=time.time(), max_attempts=1)
        child = submit(store, "child", now=time.time(), after=["parent"])
        job = fail(store)
    answer = cli("retry", "parent")
    assert answer.code == 0
    assert answer.lines == [
        f"parent {job.id}: queued again",
        f"1 waiting job ({child.id}) stays cancelled; retry them too with --with-dependents",
    ]
    shown = cli("show", "parent", "--json").json
    assert (shown["state"], shown["error"], shown["attempt"], shown["attempts_before"]) == ("queued", None, 1, 1)
    assert [attempt["outcome"] for attempt in shown["attempts"]] == ["failed"]
    assert shown["events"][-1]["message"] == "queued again; it was failed: no such file"
    assert shown["events"][-1]["data"] == {"state": "failed", "error": "no such file"}


def test_retry_what_failed(cli: Cli) -> None:
    """`--failed` takes all that failed, `--since` newer ones only, `--with-dependents` those that waited for them."""
    with cli.store() as store:
        old = submit(store, "old", now=time.time())
        mine = take(store)
        store.jobs.fail(mine.id, 1, error="e", retry=False, lost=False, now=time.time() - 7200)
        submit(store, "new", now=time.time())
        submit(store, "child", now=time.time(), after=["new"])
        submit(store, "grandchild", now=time.time(), after=["child"])
        fail(store)
    rows = cli("retry", "--failed", "--since", "1h", "--with-dependents", "--json").json
    assert [(row["name"], row["state"]) for row in rows] == [(n, "queued") for n in ("new", "child", "grandchild")]
    assert "waits for new" in cli("ls", "--json", "--filter", "name=child").json[0]["waits"]
    assert cli("retry", "--failed").lines == [f"old {old.id}: queued again"]
    assert cli("retry", "--failed").lines == ["no job to retry"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "no jobs named; give job ids, or --failed"),
        (["queued", "--failed"], 2, "job ids and --failed cannot be combined"),
        (["queued", "--since", "1h"], 2, "--since needs --failed"),
        (["--failed", "--since", "soon"], 2, "--since: found 'soon'; expected an age such as 30d or a date"),
        (["nobody"], 102, "job nobody: no such id or name"),
        (["queued"], 2, "(queued): is queued; expected a job that failed, was cancelled or quarantined"),
        (["failed", "queued"], 2, "(queued): is queued; expected a job that failed, was cancelled or quarantined"),
        (["ended"], 2, "(ended): has succeeded; submit its spec to run it once more; expected a job that failed"),
        (["child"], 2, "(child): waits for the success of job"),
    ],
)
def test_what_retry_refuses(cli: Cli, args: list[str], code: int, message: str) -> None:
    """It says why, and queues nothing, also of the jobs that could be."""
    with cli.store() as store:
        for name in ("ended", "failed"):
            submit(store, name, now=time.time())
        submit(store, "child", now=time.time(), after=["failed"])
        job = take(store)
        store.jobs.finish(job.id, 1, outputs={}, timings={}, schedule={}, now=time.time())
        fail(store)
        submit(store, "queued", now=time.time())
    answer = cli("retry", *args)
    assert answer.code == code
    assert message in answer.err
    with cli.store() as store:
        states = {job.name: job.state for job in store.jobs.list()}
    assert states == {
        "ended": JobState.SUCCEEDED,
        "failed": JobState.FAILED,
        "child": JobState.CANCELLED,
        "queued": JobState.QUEUED,
    }


def test_hold_and_release(cli: Cli) -> None:
    """A held job is not claimed and says so in ls and show; released, it is."""
    with cli.store() as store:
        job = submit(store, "a", now=time.time())
    assert cli("hold", "a").lines == [f"a {job.id}: held"]
    assert cli("hold", job.id).code == 0, "it is held already"
    with cli.store() as store:
        assert store.jobs.claim("w", device="cpu", now=time.time()) is None
    row = cli("ls", "--json", "--filter", "held=yes").json[0]
    assert row["waits"] == f"held; release it with: nimble-jobs release {job.id}"
    assert "queued held" in cli("ls").out
    assert "state: queued held" in cli("show", "a").out
    assert cli("ls", "--json", "--filter", "held=no").json == []
    assert cli("ls", "--filter", "held=perhaps").lines[0].endswith("held: found 'perhaps'; expected yes or no")
    assert cli("release", "a", "--json").json[0]["held"] is False
    assert cli("release", "a").lines == [f"nimble-jobs: job {job.id} (a): is not held"]
    with cli.store() as store:
        assert take(store).id == job.id
    assert cli("hold", "a").lines == [f"nimble-jobs: job {job.id} (a): is running; expected a queued job"]
    assert cli("hold", "a").code == 2


def test_after(cli: Cli) -> None:
    """`--after ID:WHEN` waits for that end."""
    parent = cli("submit", "job.yaml", "name=parent", "output.path=p").out.strip()
    cli("submit", "job.yaml", "name=rescue", "output.path=r", "--after", "parent:failure")
    cli("submit", "job.yaml", "name=report", "output.path=s", "run.after=[{job: parent, when: done}]")
    shown = cli("show", "rescue", "--json").json
    assert (shown["after"], shown["after_when"]) == ([parent], {parent: "failure"})
    assert shown["waits"] == f"waits for parent {parent} (failure; queued)"
    assert f"after: {parent} (done)" in cli("show", "report").out
    bad = cli("submit", "job.yaml", "--after", "parent:failed")
    assert bad.code == 2
    assert bad.lines == [
        "nimble-jobs: --after: found 'parent:failed'; expected JOB or JOB:WHEN, where WHEN is success, failure, done"
    ]
    with cli.store() as store:
        job = take(store)
        store.jobs.finish(job.id, 1, outputs={}, timings={}, schedule={}, now=time.time())
    skipped = cli("show", "rescue", "--json").json
    assert (skipped["state"], skipped["skipped_by"]) == ("cancelled", parent)
    assert skipped["error"] == f"run.after: job {parent} (parent) ended succeeded; this job waits for its failure"
    assert cli("wait", "rescue").code == 103
    with cli.store() as store:
        assert take(store).name == "report"


def test_a_group_that_is_full(cli: Cli) -> None:
    """ls says so; another limit holds for the whole group, and the one who changed it is told."""
    group = ["run.group={name: gpu, limit: 1}"]
    for n in range(2):
        cli("submit", "job.yaml", f"name=job-{n}", f"output.path=o{n}", *group)
    with cli.store() as store, store.workers.hold({"role": "worker"}) as lease:
        assert store.jobs.claim(lease.id, device="cpu", now=time.time())
        assert store.jobs.claim(lease.id, device="cpu", now=time.time()) is None
        assert cli("show", "job-1", "--json").json["waits"] == "group gpu is full: 1 of 1 run"
        answer = cli("submit", "job.yaml", "name=job-2", "output.path=o2", "run.group={name: gpu, limit: 2}")
        assert answer.lines[0] == "run.group: the limit of gpu was 1 and is 2 now, for all of its jobs"
        assert take(store).name == "job-1"


def test_many_from_a_file(cli: Cli, tmp_path: Path) -> None:
    """One spec a line, one id for all; the commands about jobs take it."""
    answer = cli("submit", "--from", lines_file(tmp_path, {}, {}, {"run": {"after": ["part-0"]}}), "run.priority=3")
    array = answer.out.strip()
    assert answer.lines[0] == f"3 jobs queued as array {array}"
    rows = cli("ls", array, "--json").json
    assert [(row["name"], row["array_index"], row["priority"]) for row in rows] == [
        ("part-2", 2, 3),
        ("part-1", 1, 3),
        ("part-0", 0, 3),
    ]
    assert [row["id"] for row in cli("ls", "--filter", f"array={array}", "--json").json] == [r["id"] for r in rows]
    shown = cli("show", array, "--json").json
    assert (shown["array"], shown["counts"]["queued"], len(shown["jobs"])) == (array, 3, 3)
    assert f"array.id: {array}" in cli("show", array).out
    assert len(cli("hold", array, "--json").json) == 3
    assert len(cli("release", array[:11], "--json").json) == 3
    assert [row["state"] for row in cli("cancel", array, "--json").json] == ["cancelled"] * 3
    assert cli("wait", array).code == 103
    assert len(cli("retry", array, "--json").json) == 3
    assert cli("ls", "zzzz").code == 102


def test_many_from_a_grid(cli: Cli, tmp_path: Path) -> None:
    """A job for each combination, with the values in its name and its output's."""
    path = "output.path=out/{{ grid:model.source }}-{{ grid:input.batch_size }}"
    grid = ["--grid", "model.source=torchvision:resnet18,torchvision:resnet34", "--grid", "input.batch_size=32,64"]
    answer = cli("submit", "job.yaml", path, "name=scan-{{ index }}", *grid, "--json")
    assert answer.code == 0, answer.err
    jobs = answer.json["jobs"]
    assert [job["name"] for job in jobs] == ["scan-0", "scan-1", "scan-2", "scan-3"]
    specs = [cli("show", job["id"], "--json").json["spec"] for job in jobs]
    assert [(s["model"]["source"], s["input"]["batch_size"]) for s in specs] == [
        ("torchvision:resnet18", 32),
        ("torchvision:resnet18", 64),
        ("torchvision:resnet34", 32),
        ("torchvision:resnet34", 64),
    ]
    assert specs[1]["output"]["path"] == str(tmp_path / "out/torchvision-resnet18-64")
    dry = cli("submit", "job.yaml", path, *grid, "--dry-run")
    assert len(dry.json) == 4
    assert dry.lines == ["4 jobs would be queued (dry run)"]
    assert len(cli("ls", "--json").json) == 4


def test_bad_lines_are_named_and_nothing_is_queued(cli: Cli, tmp_path: Path) -> None:
    """Each problem with its file, line and field."""
    path = lines_file(tmp_path, {}, {"input": {"source": "nowhere.npz", "format": "npz"}}, {"kind": "dance"})
    with path.open("a") as file:
        file.write('\n{"version": 1,\n[1]\n{"version": 1, "version": 1}\n')
    answer = cli("submit", "--from", path)
    assert answer.code == 2
    one = "expected a spec as one JSON object"
    existing = "expected one that exists, or run.after with the job that will write it"
    assert [line.removeprefix(f"{path}:") for line in answer.lines] == [
        f"2: input.source: no file or folder {tmp_path}/nowhere.npz; {existing}",
        "3: kind: found 'dance'; expected score or finetune",
        f"5: not valid JSON: Expecting property name enclosed in double quotes at column 15; {one}",
        "6: found a list; expected a mapping of fields",
        f"7: not valid JSON: 'version' is given twice; {one}",
    ]
    assert cli("ls", "--json").json == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no spec given; give SPEC, or --from FILE"),
        (["--grid", "a=1"], "--grid needs a spec; give SPEC"),
        (
            ["job.yaml", "--from", "jobs.jsonl", "--grid", "a=1"],
            "--from and --grid cannot be combined; give one of them",
        ),
        (
            ["job.yaml", "--grid", "seed"],
            "--grid: found 'seed'; expected KEY=VALUE,VALUE, such as input.batch_size=32,64",
        ),
        (["job.yaml", "--grid", "a=1,,2"], "--grid: a: found an empty value; expected KEY=VALUE,VALUE"),
        (["job.yaml", "--grid", "a=1,1"], "--grid: a: 1 is given twice; expected each value once"),
        (["job.yaml", "--grid", "a=1", "--grid", "a=2"], "--grid: a is given twice; expected each key once, with all"),
        (
            ["job.yaml", "--grid", "a=1", "--key", "k"],
            "--key works with one job only; it cannot be combined with --from or --grid",
        ),
        (
            ["job.yaml", "--grid", "a=1", "--follow"],
            "--follow works with one job only; it cannot be combined with --from or --grid",
        ),
        (["--from", "none.jsonl"], "none.jsonl: no such file; expected one JSON spec per line"),
        (["--from", "empty.jsonl"], "empty.jsonl: found 0 specs; expected from 1 to 100,000, one JSON spec per line"),
        (["job.yaml", "--from", "jobs.jsonl"], "--from and SPEC job.yaml cannot be combined; give one of them"),
        (["job.yaml", "--grid", "input.batch=1"], "override input.batch=1: input.batch: unknown field"),
        (
            ["job.yaml", "--grid", "model.seed=1,2"],
            "out/digits-score is the output of job.yaml with model.seed=1 too; "
            "expected a folder of its own, for instance with {{ grid:model.seed }} in the path",
        ),
        (
            ["job.yaml", "--grid", "output.path=a,a/b"],
            "job.yaml with output.path=a/b: output.path: {folder}/a/b lies in the output of job.yaml "
            "with output.path=a too",
        ),
        (
            ["job.yaml", "output.path=o/{{ grid:seed }}", "--grid", "model.seed=1,2"],
            "output.path: found {{ grid:seed }}; expected {{ grid:model.seed }} or {{ index }}",
        ),
        (
            ["--from", "twins.jsonl"],
            "twins.jsonl:2: output.path: {folder}/out/0 is the output of twins.jsonl:1 too; "
            "expected a folder of its own, for instance with {{ index }} in the path",
        ),
    ],
)
def test_arrays_that_are_refused(cli: Cli, tmp_path: Path, args: list[str], message: str) -> None:
    """With a reason, and nothing is queued."""
    (tmp_path / "jobs.jsonl").touch()
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "twins.jsonl").write_text(f"{json.dumps(line(tmp_path, 0))}\n" * 2)
    answer = cli("submit", *args)
    assert answer.code == 2
    assert message.replace("{folder}", str(tmp_path)) in answer.err
    assert cli("ls", "--json").json == []


def test_an_array_is_queued_whole_or_not_at_all(cli: Cli, tmp_path: Path) -> None:
    """A job that cannot be queued keeps all from it: here one that waits for nobody, and one whose key is taken."""
    path = lines_file(tmp_path, {}, {"run": {"after": ["nobody"]}})
    assert cli("submit", "--from", path).code == 102
    cli("submit", "job.yaml", "--key", "k")
    answer = cli("submit", "--from", lines_file(tmp_path, {}, {"run": {"key": "k"}}))
    assert answer.code == 2
    assert "run.key: 'k' belongs to job" in answer.err
    assert len(cli("ls", "--json").json) == 1


def test_keys_that_are_known(cli: Cli, tmp_path: Path) -> None:
    """The same file again queues nothing new where each job has a key."""
    path = lines_file(tmp_path, {}, {})
    first = cli("submit", "--from", path, "run.key=night-{{ index }}", "--json").json
    again = cli("submit", "--from", path, "run.key=night-{{ index }}", "--json")
    assert [job["id"] for job in again.json["jobs"]] == [job["id"] for job in first["jobs"]]
    assert (
        again.lines[0] == f"0 jobs queued as array {again.json['array']}; 2 jobs with the same run.key existed already"
    )

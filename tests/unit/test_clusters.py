"""Scripts and manifests that start workers: what they say, and that no value of a user becomes anything else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nimble_jobs.clusters import BurstWorkers, KubernetesJob, SlurmArray
from nimble_jobs.clusters.kubernetes import _Quoting
from nimble_jobs.errors import UsageError

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
VERSIONS = ("1.29", "1.31", "1.33", "1.35", "1.37")  # of Kubernetes; the oldest has all fields that are used
WORKERS = BurstWorkers(
    count=4, gpus=2, cpus=8, memory_bytes=32_000_000_000, time_s=4 * 3600.0, max_idle_s=300.0, grace_s=60.0
)
ARRAY = SlurmArray(workers=WORKERS, program=("/opt/venv/bin/nimble-jobs",), home="/scratch/jobs")
JOB = KubernetesJob(
    workers=WORKERS,
    image="registry.example:5000/team/nimble-jobs:1.0",
    name="workers",
    claim="shared",
    mount="/shared",
    config_map="nimble-jobs",
    secret="nimble-jobs",
    user=10001,
)
FULL = replace(
    JOB,
    namespace="1e5",
    queue="on",
    claim="a.b",
    config_map="null",
    secret="0x1",
    mount="/a b/'\"# é",
    shared_cache="s3://b/x",
)
ARRAYS = {
    "plain": ARRAY,
    "cpu": replace(ARRAY, workers=replace(WORKERS, gpus=0, count=1)),
    "full": replace(
        ARRAY,
        own_disk=True,
        partition="gpu,gpu-long",
        account="team_1",
        home="/local disk/it's",
        shared_cache="/shared/it's here",
    ),
    "module": replace(ARRAY, program=("/a b/python", "-P", "-m", "nimble_jobs.cli.main")),
}
JOBS = {
    "plain": JOB,
    "cpu": replace(JOB, workers=replace(WORKERS, gpus=0), shared_cache="off"),
    "full": FULL,
}
POD = ("spec", "template", "spec")
HOSTILE = (
    "",
    "no",
    "a\nb",
    "a b",
    "$(touch x)",
    "`id`",
    "a;b",
    "'",
    '"',
    "a: b",
    "- a",
    "&a",
    "*a",
    "x #",
    "\\",
    "{{x}}",
)
TEXTS = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(max_size=12),
    st.text("ab1-._/,:@#'\"$`\\\n \t%{}[]&*!|>~é\0\ud800", max_size=12),
    st.from_regex(r"[a-z0-9.-]{1,8}", fullmatch=True),
    st.text(max_size=8).map(lambda text: f"/{text}"),
)


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_scripts_have_no_faults_of_the_shell(array: SlurmArray, tmp_path: Path) -> None:
    """shellcheck finds nothing, and bash can read it."""
    path = tmp_path / "workers.sbatch"
    path.write_text(array.text())
    for command in ([str(SHELLCHECK), "--severity=style"], ["bash", "-n"]):
        done = subprocess.run([*command, str(path)], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_slurm_is_asked_for() -> None:
    """Each line that sbatch reads comes before the first command; the limits agree with each other."""
    lines = ARRAYS["full"].text().splitlines()
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert asked == {
        "job-name": "nimble-jobs",
        "array": "1-4",
        "partition": "gpu,gpu-long",
        "account": "team_1",
        "nodes": "1",
        "ntasks": "1",
        "gres": "gpu:2",
        "cpus-per-task": "8",
        "mem": "30518M",
        "time": "0-04:00:00",
        "signal": "B:TERM@90",
        "requeue": "",
        "open-mode": "append",
        "output": "nimble-jobs-%A_%a.log",
    }
    assert max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) < lines.index("set -euo pipefail")
    assert lines[-1].endswith(" worker start --devices all --max-idle 5m --max-time 3h55m")
    assert " --device cpu " in ARRAYS["cpu"].text()
    assert "gres" not in ARRAYS["cpu"].text()


@pytest.mark.parametrize(
    ("time_s", "grace_s", "limit", "most", "signal"),
    [
        (360.0, 60.0, "0-00:06:00", "1m", 90),
        (90_061.5, 60.0, "1-01:01:02", "1d56m1.5s", 90),
        (7200.0, 600.0, "0-02:00:00", "1h39m", 630),
    ],
)
def test_times_before_the_limit(time_s: float, grace_s: float, limit: str, most: str, signal: int) -> None:
    """A worker that uses all of its grace period has ended when the signal comes, which may be 60 s early."""
    array = replace(ARRAY, workers=replace(WORKERS, time_s=time_s, grace_s=grace_s))
    text = array.text()
    assert f"#SBATCH --time={limit}\n" in text
    assert f"--max-time {most}\n" in text
    assert f"TERM@{signal}\n" in text
    assert array.margin_s >= grace_s + 30.0 + signal


def ran(array: SlurmArray, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """The script, run by bash."""
    path = {"PATH": os.environ["PATH"]}
    return subprocess.run(["bash"], input=array.text().encode(), env=path | environment, capture_output=True)


def test_a_shared_database_must_be_named() -> None:
    """With folders of the nodes' own a worker without NIMBLE_JOBS_DB would see no job, ever."""
    array = replace(ARRAY, own_disk=True, program=("/bin/true",))
    assert ran(array, {"NIMBLE_JOBS_DB": "postgresql+psycopg://u@h/d"}).returncode == 0
    done = ran(array, {})
    assert done.returncode != 0
    assert b"NIMBLE_JOBS_DB: expected the address of the PostgreSQL database" in done.stderr
    assert ran(replace(array, own_disk=False), {}).returncode == 0


STUB = ("/bin/sh", "-c", 'printf "%s\\0" "$NIMBLE_JOBS_HOME" "$@"', "stub")  # says which words it was given


def refused(make: Callable[[], Any]) -> str | None:
    """The message, if this is refused."""
    try:
        make()
    except UsageError as error:
        return str(error)
    return None


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
@example(text="/$(id)'\"\\ `x` #;&")
def test_the_shell_gets_the_very_words(text: str) -> None:
    """A path of a folder or program is refused, or reaches the program as it is."""
    home = partial(replace, ARRAY, program=STUB, home=text)
    program = partial(replace, ARRAY, program=(*STUB, text))
    words = WORKERS.command(4 * 3600.0 - 300.0)
    if (message := refused(home)) is None:
        assert ran(home(), {}).stdout.decode().split("\0") == [text, *words, ""]
    else:
        assert message.startswith("--home: found ")
    if refused(program) is None:
        assert ran(program(), {}).stdout.decode().split("\0") == [ARRAY.home, text, *words, ""]


@given(text=TEXTS, field=st.sampled_from(["partition", "account"]))
def test_sbatch_gets_no_letter_with_a_meaning(text: str, field: str) -> None:
    """A name is refused, or adds one line that holds it; blanks, quotes and comments are in none."""
    make = partial(replace, ARRAY, **{field: text})
    if (message := refused(make)) is not None:
        assert message.startswith(f"--{field}: found ")
        return
    added = set(make().text().splitlines()) - set(ARRAY.text().splitlines())
    assert added == {f"#SBATCH --{field}={text}"}
    assert re.fullmatch(r"[A-Za-z0-9_.,+-]+", text)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_manifests_are_jobs(job: KubernetesJob, version: str) -> None:
    """The schema of batch/v1 Job, which allows no unknown field, accepts them."""
    kubernetes_validate.validate(yaml.safe_load(job.text()), version, strict=True)


def test_the_schema_can_refuse() -> None:
    """A misspelt field deep inside is noticed."""
    manifest = JOB.manifest()
    manifest["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagee"):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def test_what_kubernetes_is_asked_for() -> None:
    """Time to drain, GPUs as limits, no root, no token, failures that are none, and the password from the Secret."""
    manifest = yaml.safe_load(FULL.text())
    assert manifest == FULL.manifest()
    job, pod = manifest["spec"], manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "on"
    assert (manifest["metadata"]["namespace"], job["suspend"]) == ("1e5", True)
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")
    assert job["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 90)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["command"][-6:] == ["--devices", "all", "--max-idle", "5m", "--max-time", "4h"]
    assert container["resources"]["limits"] == {"memory": "30518Mi", "nvidia.com/gpu": 2}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    from_others = {each["name"]: each["valueFrom"] for each in container["env"] if "valueFrom" in each}
    assert from_others == {
        "NIMBLE_JOBS_DB": {"configMapKeyRef": {"name": "null", "key": "NIMBLE_JOBS_DB"}},
        "PGPASSWORD": {"secretKeyRef": {"name": "0x1", "key": "PGPASSWORD"}},
    }
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "15259Mi"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert "nvidia.com/gpu" not in JOBS["cpu"].text()
    assert "suspend" not in JOB.text()


PLACES: dict[str, tuple[str | int, ...]] = {
    "name": ("metadata", "name"),
    "namespace": ("metadata", "namespace"),
    "queue": ("metadata", "labels", "kueue.x-k8s.io/queue-name"),
    "image": (*POD, "containers", 0, "image"),
    "mount": (*POD, "containers", 0, "volumeMounts", 3, "mountPath"),
    "config_map": (*POD, "containers", 0, "env", 4, "valueFrom", "configMapKeyRef", "name"),
    "secret": (*POD, "containers", 0, "env", 5, "valueFrom", "secretKeyRef", "name"),
    "claim": (*POD, "volumes", 3, "persistentVolumeClaim", "claimName"),
    "shared_cache": (*POD, "containers", 0, "env", 6, "value"),
}


def put(tree: Any, place: Sequence[str | int], value: str) -> Any:
    """The same tree with one value changed."""
    for step in place[:-1]:
        tree = tree[step]
    tree[place[-1]] = value


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, field=st.sampled_from(list(PLACES)))
@example(text="on", field="namespace")
@example(text="1e5", field="name")
@example(text="/x: y # z", field="mount")
@example(text="/x/$(HOME): $y # z", field="shared_cache")
@example(text="a/b@sha256:" + "0" * 64, field="image")
def test_manifests_quote_or_refuse(text: str, field: str) -> None:
    """A value is refused, or is read back as the same text in its place, and nothing else changes."""
    make = partial(replace, FULL, **{field: text})
    if (message := refused(make)) is not None:
        assert message.startswith(f"--{field.replace('_', '-')}: found ")
        return
    expected = FULL.manifest()
    if (field, text) == ("shared_cache", "off"):
        return
    put(expected, PLACES[field], text.replace("$", "$$") if field == "shared_cache" else text)
    assert yaml.safe_load(make().text()) == expected
    kubernetes_validate.validate(expected, VERSIONS[-1], strict=True)


@given(text=st.from_regex(r"[A-Za-z0-9_.+~:/-]{1,8}", fullmatch=True))
@example(text="1e5")
@example(text="0o7")
@example(text="y")
@example(text="No")
@example(text="null")
def test_no_reader_takes_text_for_something_else(text: str) -> None:
    """Kubernetes reads YAML with other rules than Python: all but plain words in letters is in quotes."""
    written = yaml.dump([text], Dumper=_Quoting).strip().removeprefix("- ")
    assert written == f'"{text}"' or (re.fullmatch(r"[A-Za-z][A-Za-z./-]{2,}", text) and written == text)
    assert yaml.safe_load(written) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "--count: found 0; expected a whole number from 1 to 10000"),
        ({"gpus": -1}, "--gpus: found -1; expected a whole number from 0 to 64"),
        ({"cpus": 0}, "--cpus: found 0; expected a whole number from 1 to 4096"),
        ({"memory_bytes": 1000}, "--memory: found 1kB; expected at least 1.07GB for torch alone"),
        ({"time_s": 0.0}, "--time: found 0s; expected a time between 1m and 365d"),
        ({"time_s": 4e7}, "--time: found 462d23h6m40s; expected a time between 1m and 365d"),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    """The message names the option and what was expected."""
    assert refused(lambda: BurstWorkers(**asdict(WORKERS) | change)) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: replace(ARRAY, workers=replace(WORKERS, time_s=300.0)),
            "--time: found 5m; expected at least 6m, because workers end 5m before the limit",
        ),
        (lambda: replace(ARRAY, own_disk=True, home="scratch"), "--node-home: found 'scratch'; expected an absolute"),
        (lambda: replace(ARRAY, partition="a b"), "--partition: found 'a b'; expected a name of letters"),
        (
            lambda: replace(JOB, mount="/tmp/x"),
            "--mount: found /tmp/x; expected another folder than /, /state, /tmp, /dev",
        ),
        (lambda: replace(JOB, mount="/a:b"), "--mount: found /a:b; expected another folder than"),
        (lambda: replace(JOB, mount="/"), "--mount: found /; expected another folder than"),
        (lambda: replace(JOB, name="a" * 62), "--name: found aaa"),
        (lambda: replace(JOB, image="Team/x"), "--image: found 'Team/x'; expected a container image such as HOST/"),
        (
            lambda: replace(JOB, shared_cache="s3://u:p@b/x"),
            "--shared-cache: found a user or a password in the address",
        ),
        (lambda: replace(JOB, user=0), "--user-id: found 0; expected a whole number from 1 to 2147483647"),
    ],
)
def test_words_that_cannot_be_used_are_refused(make: Callable[[], object], message: str) -> None:
    """So are they."""
    assert (refused(make) or "").startswith(message)

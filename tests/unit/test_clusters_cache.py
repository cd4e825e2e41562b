"""Where workers of a cluster share the files of schedules, as scripts and manifests say it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import example, given, settings

from nimble_jobs.clusters import KubernetesJob
from nimble_jobs.clusters.workers import SHARED_CACHE
from nimble_jobs.settings import read_settings
from tests.unit.test_clusters import ARRAY, JOB, TEXTS, VERSIONS, refused

STUB = ("/bin/sh", "-c", f'printf "%s" "${SHARED_CACHE}"')  # says what it was given


def test_what_is_set_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable in script and manifest is that of cache.shared."""
    monkeypatch.setenv(SHARED_CACHE, "s3://bucket/folder")
    assert read_settings(tmp_path).cache.shared == "s3://bucket/folder"


def test_pods_share_schedules() -> None:
    """In the folder that they share, unless another place is named, or none. Kubernetes reads $(NAME), but not $$."""

    def cache(job: KubernetesJob) -> list[str]:
        env = job.manifest()["spec"]["template"]["spec"]["containers"][0]["env"]
        return [each["value"] for each in env if each["name"] == SHARED_CACHE]

    assert cache(JOB) == ["/shared/nimble-jobs-schedules"]
    assert cache(replace(JOB, mount="/a$(HOME)")) == ["/a$$(HOME)/nimble-jobs-schedules"]
    assert cache(replace(JOB, shared_cache="s3://bucket/folder")) == ["s3://bucket/folder"]
    assert cache(replace(JOB, shared_cache="off")) == []


def test_the_folder_of_schedules_is_made_before_the_worker_starts() -> None:
    """Workers make none; only if it is on the mount."""

    def pod(job: KubernetesJob) -> dict[str, Any]:
        manifest = yaml.safe_load(job.text())
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
        found: dict[str, Any] = manifest["spec"]["template"]["spec"]
        return found

    job = replace(JOB, mount="/a$(HOME)")
    (first,) = pod(job)["initContainers"]
    assert first["command"] == ["mkdir", "-p", "/a$$(HOME)/nimble-jobs-schedules"]
    assert first["volumeMounts"] == [{"name": "shared", "mountPath": "/a$(HOME)"}]
    (worker,) = pod(job)["containers"]
    assert (first["image"], first["securityContext"]) == (worker["image"], worker["securityContext"])
    assert pod(replace(JOB, shared_cache="/shared/mine"))["initContainers"][0]["command"][-1] == "/shared/mine"
    for place in ("off", "s3://bucket/folder"):
        assert "initContainers" not in pod(replace(JOB, shared_cache=place))


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
@example(text="/$(id)'\"\\ `x` #;&")
@example(text="s3://bucket/$(id)' x")
def test_the_shell_gets_the_very_place(text: str) -> None:
    """A place is refused, or reaches the worker as it is."""
    array = partial(replace, ARRAY, program=STUB, own_disk=True, shared_cache=text)
    if (message := refused(array)) is not None:
        assert message.startswith("--shared-cache: found ")
        return
    env = {"PATH": os.environ["PATH"], "NIMBLE_JOBS_DB": "postgresql+psycopg://u@h/d"}
    done = subprocess.run(["bash"], input=array().text().encode(), env=env, capture_output=True)
    assert done.stdout.decode() == text


def test_without_an_option_scripts_name_no_place() -> None:
    """Slurm's script knows no folder that all nodes surely share."""
    assert SHARED_CACHE not in replace(ARRAY, own_disk=True).text()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(JOB, shared_cache="x"), "--shared-cache: found 'x'; expected an absolute path"),
        (
            lambda: replace(JOB, shared_cache="s3://u:p@b/x"),
            "--shared-cache: found a user or a password in the address",
        ),
        (lambda: replace(ARRAY, shared_cache="/x"), "--shared-cache: found /x without --node-home; expected both or"),
    ],
)
def test_places_that_cannot_be_used_are_refused(make: Callable[[], object], message: str) -> None:
    """The message names the option and what was expected."""
    assert (refused(make) or "").startswith(message)

"""An S3 server for tests: one for all processes of a test run, started by whoever needs it first."""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path

import pytest

from tests import prefork
from tests.postgres import SUITE

SECRET = "wJalrXUtnFEMIsecretEXAMPLEKEY"
_START_S = 30.0
_numbers = itertools.count()


def endpoint() -> str:
    """The address of the running server."""
    suite = os.environ[SUITE]
    folder = Path(tempfile.gettempdir()) / f"nimble-jobs-s3-{suite}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "started").open("a") as started:
        fcntl.flock(started, fcntl.LOCK_EX)
        if started.tell() == 0:
            command = [sys.executable, str(Path(__file__).with_name("s3_server.py")), str(folder), suite]
            with (folder / "log").open("w") as log:
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
            deadline = time.monotonic() + _START_S
            while not (folder / "port").exists():
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.02)
            started.write("yes")
    return f"http://127.0.0.1:{(folder / 'port').read_text()}"


def bucket(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new, empty bucket, which this test and the processes that it starts can use."""
    address = endpoint()
    name = f"bucket-{os.getpid()}-{next(_numbers)}"
    urllib.request.urlopen(urllib.request.Request(f"{address}/{name}", method="PUT")).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if not os.environ.get(prefork.COLD):
        _share_descriptions()
    return name


@cache
def _share_descriptions() -> None:
    """Let this process read botocore's descriptions of S3 once, 6 MB of objects, instead of for each of its clients.

    That is most of what a client costs. Clients of one session share them as well.
    """
    from botocore import session

    session.create_loader = cache(session.create_loader)

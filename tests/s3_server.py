"""An S3 server that lives as long as the process that it is given. Run as a program by `tests.s3`.

    python s3_server.py FOLDER PID

It is moto's, on a free port of this machine, which it writes into FOLDER/port.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import threading
from pathlib import Path

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


def main(folder: Path, suite: int) -> None:
    """Serve until the process `suite` is gone, then remove the folder."""
    life = os.pidfd_open(suite)
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    (folder / "port.new").write_text(str(server.port))
    (folder / "port.new").rename(folder / "port")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    select.select([life], [], [])
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if os.fork():  # nobody has to wait for it
        os._exit(0)
    os.setsid()
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""A download is whole or not there, and each chunk of it is progress of its thread."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nimble_jobs import moves
from nimble_jobs.models.download import download

BYTES = bytes(range(256)) * 4096 * 3  # three chunks


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BYTES)))
        self.end_headers()
        self.wfile.write(BYTES[:1000] if self.path == "/cut" else BYTES)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_download_makes_progress(url: str, tmp_path: Path) -> None:
    """It is told to the listener of this thread, at each megabyte."""
    told: list[int] = []
    file = tmp_path / "new" / "model.pth"
    with moves.told_to(lambda: told.append(threading.get_ident())):
        download(f"{url}/whole", file, hash_prefix=hashlib.sha256(BYTES).hexdigest()[:8])
        threading.Thread(target=moves.made).run()
        other = threading.Thread(target=moves.made)
        other.start()
        other.join()
    assert told == [threading.get_ident()] * 4  # three chunks, and the `made` that ran in this thread
    moves.made()
    assert len(told) == 4
    assert file.read_bytes() == BYTES
    assert [path.name for path in file.parent.iterdir()] == ["model.pth"]


@pytest.mark.parametrize(
    ("path", "prefix", "message"),
    [
        ("whole", "0000", "expected one that begins with 0000"),
        ("cut", None, "ended after 1000 of|IncompleteRead"),
        ("missing", None, "404"),
    ],
)
def test_nothing_is_left_of_a_failed_download(
    url: str, tmp_path: Path, path: str, prefix: str | None, message: str
) -> None:
    """Other bytes, fewer bytes, none at all."""
    with pytest.raises(OSError, match=message):
        download(f"{url}/{path}", tmp_path / "model.pth", hash_prefix=prefix)
    assert list(tmp_path.iterdir()) == []

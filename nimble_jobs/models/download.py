"""Downloads a file, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

from nimble_jobs import moves

_CHUNK_BYTES = 1 << 20
_SILENCE_S = 60.0  # give up a server that sends nothing for so long


def download(url: str, file: Path, *, hash_prefix: str | None) -> None:
    """Download `url` into `file`. Each chunk counts as progress of the calling thread.

    `hash_prefix` is the beginning of the bytes' SHA-256, if known. Raises OSError if the network or the disk fails, or
    if the bytes have another SHA-256.
    """
    digest, received = hashlib.sha256(), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.partial")
    try:
        request = Request(url, headers={"User-Agent": "nimble-jobs"})  # noqa: S310  # the address is torchvision's
        with urlopen(request, timeout=_SILENCE_S) as answer, temporary.open("xb") as out:  # noqa: S310
            expected = answer.headers.get("Content-Length")
            while chunk := answer.read(_CHUNK_BYTES):
                out.write(chunk)
                digest.update(chunk)
                received += len(chunk)
                moves.made()
            out.flush()
            os.fsync(out.fileno())
        if expected is not None and received != int(expected):
            raise OSError(f"{url}: ended after {received} of {expected} bytes")
        if hash_prefix is not None and not digest.hexdigest().startswith(hash_prefix):
            raise OSError(f"{url}: SHA-256 {digest.hexdigest()}; expected one that begins with {hash_prefix}")
        temporary.replace(file)
    except HTTPException as e:
        raise OSError(f"{url}: {type(e).__name__}: {e}") from e
    finally:
        temporary.unlink(missing_ok=True)

"""Seals: each proves that an attempt of this store wrote a manifest.

Each claim commits a secret with its attempt. The manifest's token is a keyed hash (HMAC, RFC 2104, of SHA-256) of all
other bytes of the manifest, which name the job, the attempt, and the folder's inode. So a manifest can be judged before
the store has recorded its publication, and nothing needs to be committed before the folder takes its place.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from nimble_jobs.addresses import is_address
from nimble_jobs.job import Publication, Sealer

_TOKEN = re.compile(r"[0-9a-f]{32}")
_EMPTY = b'\n "token": ""'  # only a key of the outermost object follows a line break and one space


class Ledger(Protocol):
    """The store's record of publications, and of the secrets of attempts."""

    home: Path  # the state folder; nothing may be published in or around it

    def key(self, job_id: str, attempt: int) -> str:
        """The secret of this attempt. Raises FencedOut if another attempt owns the job."""

    def sealer(self, job_id: str, attempt: int) -> Sealer | None:
        """What an attempt of this store seals with, whatever became of it."""

    def find(self, token: str) -> Publication | None:
        """The recorded publication whose manifest carries this token."""

    def outputs(self, job_id: str) -> dict[str, Any] | None:
        """The outputs of a job from before publications were recorded."""


def sealed(contents: Mapping[str, Any], key: str) -> tuple[dict[str, Any], bytes]:
    """A manifest with its token, and its bytes."""
    unsealed = json.dumps({**contents, "token": ""}, indent=1, sort_keys=True).encode()
    token = _seal(unsealed, key)
    return {**contents, "token": token}, unsealed.replace(_EMPTY, _line(token))


def known(contents: Mapping[str, Any], raw: bytes, ledger: Ledger) -> Publication | None:
    """The publication that the store has recorded under a manifest's token, or else the one that its attempt sealed.

    `contents` are those of `raw`, which anybody may have written.
    """
    token = contents.get("token")
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        return None
    return ledger.find(token) or _sealed_publication(contents, token, raw, ledger)


def resolved(path: Path) -> str:
    """A folder's path as publications name it: with the links above it resolved."""
    return str(Path(os.path.realpath(path.parent)) / path.name)


def is_job_id(value: object) -> bool:
    """Whether the database can be asked for it."""
    return isinstance(value, str) and value.isascii() and value.isprintable()


def _sealed_publication(contents: Mapping[str, Any], token: str, raw: bytes, ledger: Ledger) -> Publication | None:
    job_id, attempt, folder = (contents.get(name) for name in ("job_id", "attempt", "folder"))
    if not is_job_id(job_id) or not isinstance(attempt, int) or not 0 < attempt < 2**31 or not isinstance(folder, str):
        return None
    sealer = ledger.sealer(str(job_id), attempt)
    if sealer is None or not hmac.compare_digest(_seal(raw.replace(_line(token), _EMPTY), sealer.key), token):
        return None
    path = sealer.output.rstrip("/") if is_address(sealer.output) else resolved(Path(sealer.output))
    digest = hashlib.sha256(raw).hexdigest()
    return Publication(token=token, job_id=str(job_id), path=path, folder=folder, manifest_sha256=digest)


def _line(token: str) -> bytes:
    return b'\n "token": "%s"' % token.encode()


def _seal(unsealed: bytes, key: str) -> str:
    return hmac.new(bytes.fromhex(key), unsealed, hashlib.sha256).hexdigest()[:32]

"""The manifest of an output in an object store: found, judged, and taken back if it names what is not there."""

from __future__ import annotations

import json
from typing import Any

from nimble_jobs.data import publish as publication
from nimble_jobs.data.publish import MANIFEST, Found
from nimble_jobs.data.seals import Ledger, known
from nimble_jobs.errors import NotFound
from nimble_jobs.objects import Objects


class Manifests:
    """The manifests at one address."""

    def __init__(self, objects: Objects, ledger: Ledger) -> None:
        self._objects, self._ledger = objects, ledger

    def find(self) -> tuple[Found | None, str]:
        """The manifest that is there, with its version; None, and "", if there is none that is one of ours."""
        objects, ledger = self._objects, self._ledger
        try:
            version = objects.stat(MANIFEST).version
            raw = objects.read(MANIFEST)
            contents = json.loads(raw)
        except (NotFound, ValueError, RecursionError):
            return None, ""
        if not isinstance(contents, dict) or contents.get("made_by") != publication.MADE_BY:
            return None, ""
        recorded = known(contents, raw, ledger)
        if recorded is None or recorded.path != objects.address:
            return Found(manifest=contents, doubt=publication.unknown(contents, ledger)), version
        return Found(manifest=contents, doubt=publication.changed(recorded, raw), publication=recorded), version

    def withdrawn(self, manifest: dict[str, Any]) -> str | None:
        """Take a manifest back if a file that it names is not there; the answer is that file. None: all are there.

        Files go if a job is cancelled while a process of it is stopped.
        """
        there = self._objects.list()
        for file in manifest["files"]:
            stat = there.get(file["name"])
            if stat is None or stat.size != file["bytes"]:
                existing, _ = self.find()
                if existing is not None and existing.manifest.get("token") == manifest["token"]:
                    self._objects.remove([MANIFEST])
                return str(file["name"])
        return None

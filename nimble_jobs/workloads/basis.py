"""What decides a job's output: work of another attempt is taken over only where this is the same."""

from __future__ import annotations

import hashlib
import json

from nimble_jobs import spec as specs
from nimble_jobs.data import Reader
from nimble_jobs.models import identity, weights_identity
from nimble_jobs.spec import JobSpec


def basis(spec: JobSpec, reader: Reader) -> str:
    """SHA-256, in hex, over the spec's model, input, output and training, and the present state of their files."""
    resolved = specs.dump(spec)
    parts = {
        "spec": {name: resolved.get(name) for name in ("kind", "model", "input", "train")},
        "output": {name: resolved["output"].get(name) for name in ("format", "fields", "shard_size")},
        "input": reader.fingerprint,
        "model": identity(spec.model),
        "weights": weights_identity(spec.model),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

"""How a scoring job pools the vectors of tokens: as its spec says, or else as the model's folder does."""

from __future__ import annotations

from pathlib import Path

from nimble_jobs.sentence import Pooling, resolve
from nimble_jobs.spec import JobSpec, parse_source
from nimble_jobs.spec.pooling_rules import pools


def pooling_of(spec: JobSpec) -> Pooling | None:
    """None if the job asks for no embedding of texts. Raises ModelError if nothing says how to pool, or if the folder
    holds modules that are not understood.
    """
    if not pools(spec):
        return None
    source = parse_source(spec.model.source)
    folder = Path(source.target) if source.scheme == "transformers" else None
    return resolve(folder, spec.output.pooling, spec.output.normalize)

"""Whole jobs from a file of texts to a file of embeddings: ours beside sentence-transformers and hand-written loops.

In processing order: prose -> corpus, models (a process) -> driver -> (a process a run: ours through the command line,
loops by `nimble_jobs.bench.text.loops`) -> agreement -> results. `peak` measures memory from outside.
"""

from nimble_jobs.bench.text.corpus import Recipe
from nimble_jobs.bench.text.measure import measure
from nimble_jobs.bench.text.request import TextSystem, TextWanted, compile_modes_of, text_systems_of
from nimble_jobs.bench.text.results import TextResults, TextRow, TextTrial, is_text

__all__ = [
    "Recipe",
    "TextResults",
    "TextRow",
    "TextSystem",
    "TextTrial",
    "TextWanted",
    "compile_modes_of",
    "is_text",
    "measure",
    "text_systems_of",
]

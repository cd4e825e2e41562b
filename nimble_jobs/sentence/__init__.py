"""What a folder of sentence-transformers says: how its tokens become one vector, and how its texts are prepared.

Only JSON is read here, without torch and without that package. `models.pooled` computes what a `Pooling` says.
"""

from nimble_jobs.sentence.folder import SentenceFolder, read_folder, read_texts_of, resolve, strangers, write_prompt
from nimble_jobs.sentence.pooling import Dense, Pooling
from nimble_jobs.sentence.prompts import problem_of_prompt, prompt_of
from nimble_jobs.sentence.sources import is_folder, read_settings, transformer_folder

__all__ = [
    "Dense",
    "Pooling",
    "SentenceFolder",
    "is_folder",
    "problem_of_prompt",
    "prompt_of",
    "read_folder",
    "read_settings",
    "read_texts_of",
    "resolve",
    "strangers",
    "transformer_folder",
    "write_prompt",
]

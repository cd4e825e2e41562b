"""Which prompt stands before the texts of a job, and whether the model's pooling allows one."""

from __future__ import annotations

from nimble_jobs.sentence.folder import SentenceFolder


def prompt_of(folder: SentenceFolder | None, prompt: str | None, name: str | None, *, alone: bool) -> str | None:
    """The prompt that a spec gives as it is or by its name, or else the folder's default; empty: none.

    The default stands before texts that are `alone` only, not before pairs. None: the folder has no prompt of that
    name.
    """
    if name is not None:
        return folder.prompts.get(name) if folder is not None else None
    if prompt is None and alone and folder is not None and folder.default_prompt:
        return folder.prompts[folder.default_prompt]
    return prompt or ""


def problem_of_prompt(folder: SentenceFolder | None, prompt: str) -> str | None:
    """Why texts with this prompt cannot be pooled as the folder says; None if they can."""
    if not prompt or folder is None or folder.prompt_left_out is None:
        return None
    return (
        f"{folder.prompt_left_out}: include_prompt is false: this model's pooling leaves out the prompt's tokens, "
        "which nimble-jobs cannot do; expected prompt: '', or a model that pools all tokens"
    )

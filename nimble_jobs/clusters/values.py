"""Checks of what users write into scripts and manifests: a value is either harmless as it stands, or refused.

Sources: Kubernetes' "Object Names and IDs" and "Labels and Selectors" for names; the OCI distribution specification for
names of images; sbatch(1) for what may follow `#SBATCH`.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from nimble_jobs.addresses import is_address, problem_of
from nimble_jobs.errors import UsageError
from nimble_jobs.spec.units import show

_SLURM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,+-]{0,199}")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(?:\.{_LABEL.pattern})*")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_DOMAIN = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = rf"(?:(?:{_DOMAIN}(?:\.{_DOMAIN})+(?::[0-9]{{1,5}})?|{_DOMAIN}:[0-9]{{1,5}}|localhost)/)?"
_IMAGE = re.compile(rf"{_HOST}{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?")
_IMAGE_LETTERS = 512
_SUBDOMAIN_LETTERS = 253


def whole(option: str, value: int, least: int, most: int) -> None:
    """Raises UsageError for a number that is out of range."""
    if not least <= value <= most:
        raise UsageError(f"{option}: found {value}; expected a whole number from {least} to {most}")


def slurm_name(option: str, text: str) -> None:
    """A partition, several with commas, or an account. sbatch splits its lines at blanks and knows quotes and comments,
    so a name holds none of these. Raises UsageError.
    """
    if not _SLURM_NAME.fullmatch(text):
        raise UsageError(f"{option}: found {show(text)}; expected a name of letters, digits and _ . , + -")


def label(option: str, text: str) -> None:
    """A name of at most 63 letters, as of a namespace. Raises UsageError."""
    if not _LABEL.fullmatch(text):
        raise UsageError(f"{option}: found {show(text)}; expected at most 63 lower-case letters, digits and -")


def subdomain(option: str, text: str) -> None:
    """A name as of a claim, a ConfigMap or a Secret. Raises UsageError."""
    if len(text) > _SUBDOMAIN_LETTERS or not _SUBDOMAIN.fullmatch(text):
        raise UsageError(f"{option}: found {show(text)}; expected a name of lower-case letters, digits, - and .")


def image(option: str, text: str) -> None:
    """The name of a container image, with or without a host, tag and digest. Raises UsageError."""
    if len(text) > _IMAGE_LETTERS or not _IMAGE.fullmatch(text):
        raise UsageError(f"{option}: found {show(text)}; expected a container image such as HOST/PATH/NAME:TAG")


def absolute(option: str, text: str) -> None:
    """A path that is printable, absolute and normal. Raises UsageError."""
    path = PurePosixPath(text)
    if not text.isprintable() or not path.is_absolute() or str(path) != text or ".." in path.parts:
        raise UsageError(f"{option}: found {show(text)}; expected an absolute path of printable letters, without ..")


def place(option: str, text: str) -> None:
    """A folder, or an address in an object store, that workers on several nodes share. Raises UsageError."""
    if not is_address(text):
        absolute(option, text)
    elif problem := problem_of(text):
        raise UsageError(f"{option}: {problem[0]}; expected {problem[1]}")

"""Addresses in object stores, such as s3://bucket/folder: which ones can be used, and what is wrong with others. And
what in a database's address must not be shown.
"""

from __future__ import annotations

import re
from glob import has_magic
from importlib.util import find_spec

# The driver of fsspec for each scheme. Only that of s3 is tested.
DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
EXPECTED = "an address such as s3://BUCKET/FOLDER"
SECRET_OPTIONS = frozenset({"password", "sslpassword"})  # of a database's address
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_INSTALL = {"s3fs": "pip install 'nimble-jobs[objects]'"}


def is_address(text: str) -> bool:
    """Whether it names a scheme, as a path never does."""
    return _ADDRESS.match(text) is not None


def split(address: str) -> tuple[str, str, str]:
    """Scheme, bucket and the rest."""
    found = _ADDRESS.fullmatch(address)
    assert found is not None
    bucket, _, rest = found[2].partition("/")
    return found[1], bucket, rest


def problem_of(text: str, *, whole_bucket: bool = False) -> tuple[str, str] | None:
    """What is wrong with an address, and what was expected. What may be a password is never shown.

    `whole_bucket`: it may name a bucket and nothing in it.
    """
    scheme, bucket, rest = split(text)
    if scheme not in DRIVERS:
        return f"found the scheme {scheme}", f"a path, or an address that begins with {_either(DRIVERS)}://"
    if "@" in bucket:
        return "found a user or a password in the address", f"{EXPECTED}; credentials belong into the environment"
    if not bucket:
        return f"found {text!r}, which names no bucket", EXPECTED
    if not _BUCKET.fullmatch(bucket):
        return f"found the bucket {bucket!r}", "letters, digits and . _ -"
    if not rest.strip("/"):
        if whole_bucket:
            return None
        return f"found {text!r}, which names a whole bucket", f"a folder in it: {scheme}://{bucket}/FOLDER"
    if any(part in ("", ".", "..") or part.startswith(".") for part in rest.rstrip("/").split("/")):
        return f"found {text!r}, with a part that is empty or begins with a dot", "names between single slashes"
    if "?" in rest or "#" in rest or "::" in text or not text.isprintable():
        return f"found {text!r}", f"{EXPECTED}, without ?, #, :: and control characters"
    return None


def problem_of_driver(address: str) -> tuple[str, str] | None:
    """What must be installed before the address can be used, and how; None if nothing."""
    scheme, _, _ = split(address)
    package = DRIVERS[scheme]
    if find_spec(package) is not None:
        return None
    return f"{scheme}:// needs the package {package}, which is not installed", _INSTALL.get(
        package, f"pip install {package}"
    )


def normal(address: str) -> str:
    """The address without slashes at its end."""
    return address.rstrip("/")


def fixed_part(address: str) -> str:
    """The address without the first part that has a wildcard, and all after it."""
    scheme, _, path = address.partition("://")
    parts = path.split("/")
    fixed = next((i for i, part in enumerate(parts) if has_magic(part)), len(parts))
    return f"{scheme}://{'/'.join(parts[:fixed])}"


def _either(names: dict[str, str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"

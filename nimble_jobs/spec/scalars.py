"""The meaning of an unquoted YAML scalar, by the core schema of YAML 1.2.

YAML 1.1 reads `on` as true, `12:30:00` as 45000 and `1e-5` as a text; here the first two are texts and the third is a
number.
"""

from __future__ import annotations

import math
import re

from nimble_jobs.spec.units import BadValue

Scalar = None | bool | int | float | str

NULLS = frozenset(("", "~", "null", "Null", "NULL"))
BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OTHER_BASE = re.compile(r"0(?:o[0-7]+|x[0-9a-fA-F]+)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")

CORE_TAG = "tag:yaml.org,2002:"


def resolve(text: str) -> Scalar:
    """The value of a plain scalar. Raises BadValue for a number that could be read in two ways or that does not fit."""
    if text in NULLS:
        return None
    if text in BOOLS:
        return BOOLS[text]
    if _INT.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > 1 and digits.startswith("0"):
            # YAML 1.1 reads it as octal, YAML 1.2 as decimal: either would surprise some users.
            raise BadValue(f"found {_short(text)}, which has a leading zero", "a number without it, or text in quotes")
        return _fitting(text, 10)
    if _OTHER_BASE.fullmatch(text):
        return _fitting(text, 8 if text[1] == "o" else 16)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise BadValue(f"found {_short(text)}, which is too large", "a finite number")
        return number
    if _NOT_FINITE.fullmatch(text):
        raise BadValue(f"found {text}", "a finite number")
    return text


def resolve_tagged(text: str, tag: str) -> Scalar:
    """The value of a scalar with an explicit tag. Raises BadValue unless the text is of the tag's type."""
    if tag in ("!", f"{CORE_TAG}str"):
        return text
    value = resolve(text)
    match tag.removeprefix(CORE_TAG):
        case "null" if value is None:
            return None
        case "bool" if isinstance(value, bool):
            return value
        case "int" if isinstance(value, int) and not isinstance(value, bool):
            return value
        case "float" if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    shown = tag.replace(CORE_TAG, "!!")
    raise BadValue(f"found {_short(text)} with the tag {_short(shown)}", "a value without a tag")


def _fitting(text: str, base: int) -> int:
    digits = text[2:] if base != 10 else text
    if len(text) <= 32 and -(2**63) <= (value := int(digits, base)) < 2**63:
        return value
    raise BadValue(f"found {_short(text)}, which is too large", "a number of 64 bits")


def _short(text: str) -> str:
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 40 else f"{text[:37]}..."

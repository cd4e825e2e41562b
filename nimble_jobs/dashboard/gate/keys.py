"""The secrets: a token in the printed address, a cookie for the browser, a token against forged requests.

Cookie and CSRF token are derived from the token, so that neither tells it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from nimble_jobs.errors import StoreError
from nimble_jobs.whole import write_whole

FILE = "dashboard.token"  # in the state folder, which only its owner can read
_BYTES = 32
_TOKEN = re.compile(r"[0-9a-f]{64}")


class Keys:
    """The secrets of one dashboard."""

    def __init__(self, token: str, port: int) -> None:
        self.token = token
        self.cookie_name = f"nimble-jobs-{port}"  # browsers do not tell ports apart
        self.cookie = self._derived("cookie")
        self.csrf = self._derived("csrf")

    def is_token(self, text: str | None) -> bool:
        return _equal(text, self.token)

    def is_cookie(self, text: str | None) -> bool:
        return _equal(text, self.cookie)

    def is_csrf(self, text: str | None) -> bool:
        return _equal(text, self.csrf)

    def _derived(self, purpose: str) -> str:
        return hmac.new(bytes.fromhex(self.token), purpose.encode(), hashlib.sha256).hexdigest()


def token_of(home: Path) -> str:
    """The token of a state folder: 32 random bytes, in hex. It is made once, so that open pages outlive a restart.

    Removing the file makes the next start choose another. Raises StoreError if the file holds anything else.
    """
    path = home / FILE
    try:
        if not path.exists():
            write_whole(path, secrets.token_bytes(_BYTES).hex().encode(), mode=0o600)
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        token = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}; the dashboard keeps its token there") from e
    if not _TOKEN.fullmatch(token) or path.stat().st_uid != os.geteuid():
        raise StoreError(f"{path}: not a token that the dashboard wrote; remove it to have another one made")
    return token


def _equal(text: str | None, secret: str) -> bool:
    """Compared in constant time."""
    return text is not None and hmac.compare_digest(text.encode("utf-8", "replace"), secret.encode())

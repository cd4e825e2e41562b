"""The databases over which the contract of the store holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    """The database of a new store, also in processes that the test starts: the state folder's own, or an empty schema
    of PostgreSQL.
    """
    if request.param == "sqlite":
        yield None
        return
    with postgres.schema() as found:
        monkeypatch.setenv("NIMBLE_JOBS_DB", found)
        yield found

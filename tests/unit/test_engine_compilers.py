"""Inductor's compile processes end with the build that started them, or with the last of several builds."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nimble_jobs.engine.inductor import keeping_compilers, stop_compilers


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows when the processes are ended."""
    found: list[str] = []
    pools = SimpleNamespace(shutdown_compile_workers=lambda: found.append("stopped"))
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", pools)
    return found


def test_one_build(stops: list[str]) -> None:
    stop_compilers()
    assert stops == ["stopped"]


def test_several_builds(stops: list[str]) -> None:
    """Also if one fails, or is within another's turn."""

    def build() -> None:
        stop_compilers()
        with keeping_compilers():
            stop_compilers()
        stop_compilers()
        assert stops == []
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"), keeping_compilers():
        build()
    assert stops == ["stopped"]
    stop_compilers()
    assert stops == ["stopped"] * 2


def test_where_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that knows the processes is slow to load, and there are none."""
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile", raising=False)
    with keeping_compilers():
        pass
    assert "torch._inductor.async_compile" not in sys.modules

"""No module imports one that imports it, at whatever time and for whatever purpose."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

import nimble_jobs
from tests import prefork

ROOT = Path(nimble_jobs.__file__).parent


def modules() -> dict[str, Path]:
    named = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def imported(source: str, known: dict[str, Path]) -> Iterator[str]:
    """The modules of this package that a source imports: at its top, in functions, and for types alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in known else node.module


def test_no_modules_import_each_other() -> None:
    """The import contracts look at rooms; this looks at single modules, and at imports for types, too."""
    known, graph = modules(), nx.DiGraph()
    for name, path in known.items():
        graph.add_edges_from((name, other) for other in imported(path.read_text(), known) if other in known)
    assert graph.number_of_edges() > 1000
    cycles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    loops = [name for name in known if graph.has_edge(name, name)]
    assert cycles == []
    assert loops == []


def test_every_module_can_be_imported() -> None:
    """But for programs, and what needs a GPU or Ray."""
    left_out = ("__main__", "depthwise_triton", "migrations.env", "loops.ray_data", "ray.driver")
    names = [name for name in modules() if not name.endswith(left_out)]
    assert len(names) > 500
    code = "import importlib, sys; [*map(importlib.import_module, sys.argv[1:])]"
    done = prefork.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

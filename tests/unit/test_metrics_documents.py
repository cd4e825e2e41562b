"""The Grafana dashboard, the alert rules and the page name only families that exist, and the page names all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nimble_jobs.metrics import FAMILIES
from nimble_jobs.metrics.grafana import dashboard
from tests.scripts import load

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {name for family in FAMILIES for name in family.sample_names}
LABELS = {name: set(family.labels) | {"instance"} for family in FAMILIES for name in family.sample_names}
BOARD: dict[str, Any] = json.loads(dashboard())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]

_NAME = re.compile(r"\bnimble_jobs_\w+")
_MATCHERS = re.compile(r"\b(nimble_jobs_\w+)\{([^}]*)\}")
_BY = re.compile(r"\bby \(([^)]*)\)")


def unknown(expression: str) -> Iterator[str]:
    """Names of families and labels in an expression that no exposition has."""
    families = _NAME.findall(expression)
    if not families:
        yield f"no family in {expression}"
    yield from (name for name in families if name not in NAMES)
    for name, inside in _MATCHERS.findall(expression):
        for label in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', inside):
            if label not in LABELS.get(name, set()):
                yield f"{label} of {name}"
    known = set().union(*(LABELS.get(name, set()) for name in families))
    for names in _BY.findall(expression):
        yield from (f"by {name}" for name in re.split(r",\s*", names) if name not in known)


def test_what_does_not_exist_is_found() -> None:
    """The check itself sees a wrong family, a wrong label, and an expression without a family."""
    assert list(unknown("rate(nimble_jobs_gone_total[5m])")) == ["nimble_jobs_gone_total"]
    assert list(unknown('nimble_jobs_jobs{status="x"}')) == ["status of nimble_jobs_jobs"]
    assert list(unknown("sum by (status) (nimble_jobs_jobs)")) == ["by status"]
    assert list(unknown("up")) == ["no family in up"]
    assert list(unknown('sum by (state, instance) (nimble_jobs_jobs{instance=~"x", kind!="y"})')) == []


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels(panel: dict[str, Any]) -> None:
    """Each has a title, a description, a unit, and queries of families and labels that exist, in the chosen source."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        assert [*unknown(target["expr"])] == []
        matchers = _MATCHERS.findall(target["expr"])
        assert len(matchers) == len(_NAME.findall(target["expr"]))
        assert all('instance=~"$instance"' in inside for _, inside in matchers)
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_dashboard() -> None:
    """Its ids are unique, no panels overlap, and its variables are a data source and the instances."""
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert BOARD["schemaVersion"] >= 41
    kinds = {each["name"]: each["type"] for each in BOARD["templating"]["list"]}
    assert kinds == {"datasource": "datasource", "instance": "query"}
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_dashboard_shows_every_family() -> None:
    """Except what Grafana needs not: the version is a variable's source, and the time of a scrape is for operators."""
    shown = {name for panel in PANELS for target in panel["targets"] for name in _NAME.findall(target["expr"])}
    missing = {family.name for family in FAMILIES if not shown & set(family.sample_names)}
    assert missing == {"nimble_jobs", "nimble_jobs_gpu_names", "nimble_jobs_scrape_duration_seconds"}


def test_alert_rules() -> None:
    """Each has an expression of families that exist, a severity, a summary and what to do."""
    (group,) = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names))
    for rule in group["rules"]:
        assert [*unknown(rule["expr"])] == [], rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["description"]


def test_the_table_of_families() -> None:
    """docs/metrics.md has the table that `scripts/gen_metrics_table.py` makes of the families."""
    generator = load("gen_metrics_table")
    page = (DOCS / "metrics.md").read_text()
    assert generator.with_table(page) == page, "run scripts/gen_metrics_table.py"


def test_families() -> None:
    """Names and helps follow the conventions: one prefix, base units, one plain line each."""
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))
    for family in FAMILIES:
        assert family.name.startswith("nimble_jobs")
        assert family.help.endswith(".")
        assert len(family.help) < 140
        assert "\n" not in family.help
        assert not family.name.endswith(
            ("_total", "_count", "_sum", "_info", "_ms", "_us", "_minutes", "_kb", "_percent")
        )

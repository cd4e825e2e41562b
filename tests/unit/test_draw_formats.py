"""The drawings: HTML, SVG, trace and DOT hold every task and sync, whole and escaped."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter, defaultdict
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings

from nimble_jobs.draw import Drawing, labels, simulate, to_chrome_trace, to_dot, to_html, to_svg, write
from nimble_jobs.draw.chart import Scale, ticks
from nimble_jobs.errors import UsageError
from nimble_jobs.graph.dag import build_dag
from nimble_jobs.graph.reduction import minimum_equivalent_graph
from nimble_jobs.schedule import BufferKind, Schedule
from tests.strategies import flat, flow, network, program, schedule, schedules, task

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "input"}
NASTY = "</title><script>alert('x')</script>\"&\\\n\x00\ud800]]>"


class Page(HTMLParser):
    """A parsed page: every element, and proof that each one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: defaultdict[str, list[str]] = defaultdict(list)
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text[self.open[-1]].append(data)

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.elements if name in (attrs.get("class") or "").split()]


def nasty() -> Schedule:
    """A schedule whose every name tries to break out."""
    odd = dataclasses.replace(task(0, writes=[flat(0, 8)], reads=[flat(1, 8)]), op=f"{NASTY}.a.b", source=NASTY)
    made = program([odd], [BufferKind.INTERMEDIATE, BufferKind.STATE], nbytes=[8, 8])
    buffers = tuple(dataclasses.replace(b, name=NASTY) for b in made.buffers)
    return dataclasses.replace(schedule(dataclasses.replace(made, buffers=buffers)), key=NASTY, device=NASTY)


def bars_of(text: str) -> dict[int, tuple[float, float, float]]:
    """From an SVG, by task: left edge, right edge and top of its bar in pixels."""
    found = {}
    for group in ET.fromstring(text).iter(f"{SVG}g"):
        if "data-task" in group.attrib:
            rect = group.find(f"{SVG}rect")
            assert rect is not None
            x, width, y = (float(rect.attrib[name]) for name in ("x", "width", "y"))
            found[int(group.attrib["data-task"])] = (x, x + width, y)
    return found


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_the_page_shows_every_task_and_every_sync(drawn: Schedule) -> None:
    """One bar a task, one arrow a sync, a mark on each critical task, one table row a task, and the header's facts."""
    page = Page(to_html(drawn))
    timing = simulate(drawn)
    assert sorted(int(t["data-task"] or "") for t in page.of_class("task")) == list(range(len(drawn.program.tasks)))
    arrows = Counter((int(a["data-before"] or ""), int(a["data-after"] or "")) for a in page.of_class("sync"))
    assert arrows == Counter((s.before, s.after) for s in drawn.plan.syncs)
    assert len(page.of_class("mark")) == len(timing.critical)
    assert len([1 for tag, _ in page.elements if tag == "tr"]) == len(drawn.program.tasks) + 1
    assert dict(zip(page.text["dt"], page.text["dd"], strict=True)) == dict(labels.summary(drawn, timing))


@pytest.mark.parametrize("span_us", [0.0, 1e-308])
def test_no_time_has_no_pixels(span_us: float) -> None:
    """Also where its reciprocal is no number."""
    assert Scale(800.0, span_us).per_us == 0.0


@pytest.mark.parametrize("span_us", [0.0, 5e-324, 1e-308, float("nan")])
def test_no_time_has_one_tick(span_us: float) -> None:
    """Also if it is too short for a tenth of it to be a number."""
    assert ticks(span_us) == [0.0]


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_bars_of_a_stream_never_overlap(drawn: Schedule) -> None:
    """In the SVG bars stand in their stream's row, in launch order, side by side."""
    bars = bars_of(to_svg(drawn))
    assert len(bars) == len(drawn.program.tasks)
    timing = simulate(drawn)
    edge: dict[int, float] = {}
    rows: dict[int, float] = {}
    for i in drawn.plan.order:
        left, right, top = bars[i]
        stream = drawn.plan.stream_of[i]
        assert rows.setdefault(stream, top) == top
        visible = timing.end_us[i] - timing.start_us[i] > timing.makespan_us / 1000  # else widened so as to be seen
        if visible:
            assert left >= edge.get(stream, 0.0) - 0.011  # two decimals
            edge[stream] = right
    assert len(set(rows.values())) == len(rows)


def test_pages_refer_to_nothing_outside() -> None:
    """No address but the name of the SVG namespace, no link, no image, no import."""
    drawn = schedule(flow(network(50, Random(1)), Random(1)))
    for text in (to_html(drawn), to_svg(drawn)):
        assert set(re.findall(r"https?://[^\s\"'<]*", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"<(link|img|iframe|object|embed|use|image)\b|@import|\bsrc=|url\((?!#)", text)


def test_names_are_escaped_everywhere() -> None:
    """Names that hold markup, quotes, control characters or halves of surrogates change no structure."""
    page = Page(to_html(nasty()))
    plain = Page(to_html(schedule(program([task(0)], []))))
    assert Counter(tag for tag, _ in page.elements)["script"] == Counter(tag for tag, _ in plain.elements)["script"]
    assert any("alert" in text for text in page.text["td"])
    ET.fromstring(to_svg(nasty()))
    json.dumps(json.loads(to_chrome_trace(nasty())), ensure_ascii=False).encode()
    for text in (to_html(nasty()), to_svg(nasty()), to_dot(nasty()), to_chrome_trace(nasty())):
        text.encode()
        assert "\x00" not in text


def test_drawings_can_be_read_without_seeing_them() -> None:
    """Charts have a role, a title and a description; the page names its language and its controls."""
    drawn = schedule(flow(network(12, Random(2)), Random(2)))
    page = Page(to_html(drawn))
    ids = {attrs["id"]: tag for tag, attrs in page.elements if "id" in attrs}
    chart = next(attrs for tag, attrs in page.elements if attrs.get("id") == "chart")
    assert chart["role"] == "img"
    assert [ids[name] for name in (chart["aria-labelledby"] or "").split()] == ["title", "desc"]
    assert ("html", {"lang": "en"}) in page.elements
    static = ET.fromstring(to_svg(drawn))
    assert static.attrib["role"] == "img"
    assert static.find(f"{SVG}title") is not None


def test_a_schedule_without_tasks_or_times_can_be_drawn() -> None:
    """An empty program gives empty drawings, one without measurements says that it counts in units."""
    empty = schedule(program([], []))
    Page(to_html(empty))
    ET.fromstring(to_svg(empty))
    assert "units" in to_html(schedule(program([task(0), task(1)], [])))


def test_fifteen_hundred_tasks_are_drawn_in_a_file_of_reasonable_size() -> None:
    """The page of a large network stays below 2 MB, and hides its arrows until they are asked for."""
    drawn = schedule(flow(network(1500, Random(3)), Random(3)), 8, tuple(float(1 + i % 7) for i in range(1500)))
    text = to_html(drawn)
    assert len(text) < 2_000_000
    assert len(Page(text).of_class("sync")) == len(drawn.plan.syncs) > 200
    assert re.search(r'id="arrows"\s*>', text)


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_the_trace_has_a_track_a_stream_and_a_flow_a_sync(drawn: Schedule) -> None:
    """Complete events carry the times of the simulation; each flow leaves its task within it and enters the other."""
    trace = json.loads(to_chrome_trace(drawn))
    timing = simulate(drawn)
    by_phase: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        by_phase[event["ph"]].append(event)
    names = {e["tid"]: e["args"]["name"] for e in by_phase["M"] if e["name"] == "thread_name"}
    assert names == {stream + 1: f"stream {stream}" for stream in range(drawn.plan.streams)}
    tasks = {event["args"]["task"]: event for event in by_phase["X"]}
    assert len(tasks) == len(by_phase["X"]) == len(drawn.program.tasks)
    for i, event in tasks.items():
        assert (event["ts"], event["tid"]) == (timing.start_us[i], drawn.plan.stream_of[i] + 1)
        assert event["dur"] == timing.end_us[i] - timing.start_us[i]
    ends = {event["id"]: event for event in by_phase["f"]}
    assert len(by_phase["s"]) == len(ends) == len(drawn.plan.syncs)
    for flow_start in by_phase["s"]:
        sync = drawn.plan.syncs[flow_start["id"]]
        before, after, end = tasks[sync.before], tasks[sync.after], ends[flow_start["id"]]
        assert flow_start["tid"] == before["tid"]
        assert before["ts"] <= flow_start["ts"] <= before["ts"] + before["dur"]
        assert (end["tid"], end["ts"], end["bp"]) == (after["tid"], after["ts"], "e")


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_the_graph_is_the_minimum_equivalent_one(drawn: Schedule) -> None:
    """DOT holds its nodes and edges, bold within a stream, dashed for exactly the syncs."""
    text = to_dot(drawn)
    meg = minimum_equivalent_graph(build_dag(drawn.program))
    edges = {(int(u), int(v)): style for u, v, style in re.findall(r"^  t(\d+) -> t(\d+) \[style=(\w+)", text, re.M)}
    assert set(edges) == {(u, v) for v, us in enumerate(meg.preds) for u in us}
    assert {e for e, style in edges.items() if style == "dashed"} == {(s.before, s.after) for s in drawn.plan.syncs}
    same = {(u, v) for u, v in edges if drawn.plan.stream_of[u] == drawn.plan.stream_of[v]}
    assert {e for e, style in edges.items() if style == "bold"} == same
    assert len(re.findall(r'^  t\d+ \[label="', text, re.M)) == len(drawn.program.tasks)


def test_dot_strings_stay_closed() -> None:
    """Quotes, backslashes and line breaks in names do not end a DOT string."""
    text = to_dot(nasty())
    without = re.sub(r'"(?:[^"\\\n]|\\.)*"', "S", text)
    assert '"' not in without
    assert without.count("{") == without.count("}") == 1


@pytest.mark.parametrize(
    ("op", "name", "family"),
    [
        ("aten.convolution.default", "convolution", "matmul, convolution"),
        ("aten.add.Tensor", "add", "element by element"),
        ("aten.cat.default", "cat", "copy, concatenation"),
        ("aten.native_batch_norm.default", "native_batch_norm", "normalisation"),
        ("triton.triton_poi_fused_cat_3", "triton_poi_fused_cat_3", "element by element"),
        ("triton.triton_red_fused_convolution_mean_1", "triton_red_fused_convolution_mean_1", "pooling, reduction"),
        ("odd", "odd", "element by element"),
    ],
)
def test_operators_have_short_names_and_families(op: str, name: str, family: str) -> None:
    """Names lose namespace and overload; what a compiled kernel fuses does not decide its family."""
    assert (labels.short(op), labels.family(op)) == (name, family)


@pytest.mark.parametrize(
    ("us", "text"), [(0, "0 µs"), (2.5, "2.5 µs"), (521, "521 µs"), (1003, "1.003 ms"), (2.5e6, "2.5 s")]
)
def test_times_have_units(us: float, text: str) -> None:
    """Three or four digits, with the unit that keeps them short."""
    assert labels.duration(us) == text


@pytest.mark.parametrize("span", [0.0, 0.003, 1.0, 99.9, 521.0, 1.06e6, 3e9])
def test_ticks_are_few_and_round(span: float) -> None:
    """The axis has at most a dozen marks, evenly spaced, the first at nought and none past the end."""
    found = ticks(span)
    assert found[0] == 0
    assert len(found) <= 12
    assert found[-1] <= span * (1 + 1e-6)
    assert span == 0 or len(found) >= 5


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    """A drawing takes the place of an older one, leaves nothing else behind, and has the usual permissions."""
    path = tmp_path / "a.svg"
    path.write_text("old")
    drawn = schedule(program([task(0)], []))
    Drawing.timeline(path).save(drawn)
    assert path.read_text() == to_svg(drawn)
    assert list(tmp_path.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_suffixes_choose_the_drawing(tmp_path: Path) -> None:
    """The timeline is a page, an SVG or a trace; trace and dot take any name."""
    drawn = schedule(program([task(0)], []))
    for made, text in (
        (Drawing.timeline(tmp_path / "a.HTML"), to_html(drawn)),
        (Drawing.timeline(tmp_path / "a.json"), to_chrome_trace(drawn)),
        (Drawing.trace(tmp_path / "trace"), to_chrome_trace(drawn)),
        (Drawing.dot(tmp_path / "graph.gv"), to_dot(drawn)),
    ):
        made.save(drawn)
        assert made.path.read_text() == text


def test_files_that_cannot_be_written_are_refused_early(tmp_path: Path) -> None:
    """An unknown suffix, a folder and a missing folder are bad usage before anything is built; later failures too."""
    with pytest.raises(UsageError, match=r"\.html, \.svg or \.json"):
        Drawing.timeline(tmp_path / "a.png")
    with pytest.raises(UsageError, match="is a folder"):
        Drawing.dot(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        Drawing.trace(tmp_path / "missing" / "a.json")
    with pytest.raises(UsageError, match="cannot be written"):
        write(tmp_path / "missing" / "a.json", "{}")

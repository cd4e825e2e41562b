"""Which rows of a listing are printed, and how wide its columns are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.cli import output, render
from nimble_jobs.cli.cache_rows import COLUMNS as CACHE_COLUMNS
from nimble_jobs.cli.cache_rows import shape
from nimble_jobs.cli.filters import Keys, Kind
from nimble_jobs.cli.listing import Column, Selection, _shown, _widths
from nimble_jobs.errors import UsageError
from nimble_jobs.views import figures

NOW = 1_800_000_000.0
KEYS: Keys = {
    "id": Kind.TEXT,
    "bytes": Kind.BYTES,
    "replay_us": Kind.MICROSECONDS,
    "build_s": Kind.SECONDS,
    "hits": Kind.NUMBER,
    "speedup": Kind.FACTOR,
    "created_at": Kind.TIME,
    "last_used_at": Kind.TIME,
    "state": ("ready", "stale"),
    "resident": Kind.TEXTS,
}


def row(name: str, *, nbytes: int = 0, replay_us: float = 0.0, age_s: float = 0.0) -> dict[str, object]:
    return {
        "id": name,
        "bytes": nbytes,
        "replay_us": replay_us,
        "build_s": age_s,
        "hits": nbytes,
        "speedup": None if name == "never" else replay_us / 1000,
        "created_at": figures.iso(NOW - age_s),
        "last_used_at": None if name == "never" else figures.iso(NOW - age_s),
        "state": "ready",
        "resident": ["3-abc"] if name == "large" else [],
    }


ROWS = [
    row("small", nbytes=10, replay_us=500.0, age_s=60.0),
    row("large", nbytes=2_000_000, replay_us=2500.0, age_s=40 * 86400.0),
    row("never", nbytes=1000, replay_us=1000.0, age_s=3600.0),
]


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        ("size>1MB", ["large"]),
        ("size>=1kB", ["large", "never"]),
        ("bytes=10", ["small"]),
        ("replay<2ms", ["small", "never"]),
        ("replay_us<=500", ["small"]),
        ("build>1d", ["large"]),
        ("used>30d", ["large"]),
        ("used<1h", ["small"]),
        ("used=null", ["never"]),
        ("created>=1h", ["large", "never"]),
        ("created<1h30m", ["small", "never"]),
        ("created<2027-01-01", ["large"]),
        ("created>2027-01-01T00:00:00+00:00", ["small", "never"]),
        ("created=2027-*", ["small", "never"]),
        ("created=2027-01-15T08:00:00Z", []),
        ("created=2027-01-15T07:59Z", ["small"]),
        ("created=2027-01-15", ["small", "never"]),
        ("created!=2027-01-15", ["large"]),
        ("used!=null", ["small", "large"]),
        ("hits>=1000", ["large", "never"]),
        ("speedup>2x", ["large"]),
        ("speedup<2.5×", ["small"]),
        ("speedup=2.5", ["large"]),
        ("speedup=null", ["never"]),
        ("resident=yes", ["large"]),
        ("resident=no", ["small", "never"]),
        ("resident!=True", ["small", "never"]),
        ("resident=3-*", ["large"]),
        ("resident!=3-abc", ["small", "never"]),
        ("id=*l*", ["small", "large"]),
        ("state!=ready", []),
        ("state=stale", []),
        ("state=re*", ["small", "large", "never"]),
    ],
)
def test_filters(condition: str, names: list[str]) -> None:
    """Sizes, durations and ages are understood under short names; a row without a value never matches an order."""
    assert [r["id"] for r in Selection(filters=[condition], now=NOW).apply(list(ROWS), KEYS)] == names


@pytest.mark.parametrize("rows", [ROWS, []])
@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("siz>1", "unknown key 'siz'"),
        ("size", "'size' is not a condition"),
        ("used", "'used' is not a condition"),
        ("size>lots", "bytes: found 'lots'; expected bytes or a size"),
        ("size=", "bytes: found ''; expected bytes or a size"),
        ("used>abc", "last_used_at: found 'abc'; expected an age such as 30d or a date such as 2026-01-31"),
        ("used>5", "last_used_at: found '5'; expected an age"),
        ("used=5d", "last_used_at: found '5d'; expected an age"),
        ("created<2026-13-45", "created_at: found '2026-13-45'; expected an age"),
        ("created=yesterday*", "created_at: found 'yesterday\\*'; expected an age"),
        ("state>5", "state holds text, which has no order; expected state=VALUE or state!=VALUE"),
        ("state=old", "state: found 'old'; expected one of ready, stale"),
        ("state!=", "state: found ''; expected one of ready, stale"),
        ("resident>1", "resident holds text, which has no order"),
        ("hits>abc", "hits: found 'abc'; expected a number such as 3"),
        ("hits>2x", "hits: found '2x'; expected a number such as 3"),
        ("hits>nan", "hits: found 'nan'; expected a number"),
        ("hits>=null", "hits: found 'null'; expected a number"),
        ("speedup>fast", "speedup: found 'fast'; expected a number such as 2 or 2.5x"),
        ("replay<5MB", "replay_us: found '5MB'; expected seconds or a duration"),
    ],
)
def test_bad_filters(rows: list[dict[str, object]], condition: str, said: str) -> None:
    """Named with what was expected, whether there are rows or not; also where an earlier condition leaves none."""
    for filters in ([condition], ["id=nothing", condition]):
        with pytest.raises(UsageError, match=f"^--filter: {said}"):
            Selection(filters=filters, now=NOW).apply(list(rows), KEYS)


@pytest.mark.parametrize("rows", [ROWS, []])
def test_bad_sort(rows: list[dict[str, object]]) -> None:
    """Also without rows."""
    with pytest.raises(UsageError, match="--sort: unknown key 'siz'"):
        Selection(sort="-siz", now=NOW).apply(list(rows), KEYS)


def test_sort_under_short_names() -> None:
    """Rows without a value come last, whichever way."""
    for sort, names in (("-size", ["large", "never", "small"]), ("used", ["large", "small", "never"])):
        assert [r["id"] for r in Selection(sort=sort, now=NOW).apply(list(ROWS), KEYS)] == names


@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=6),
    available=st.integers(20, 200),
)
def test_widths(lengths: list[tuple[int, bool]], available: int) -> None:
    """Nothing is cut that need not be: flexible columns give way, none below eight, all others keep what they hold."""
    cells = {f"c{i}": "x" * length for i, (length, _) in enumerate(lengths)}
    columns = [
        Column(header="H", cell=lambda r, name=f"c{i}": r[name], flexible=flexible)
        for i, (_, flexible) in enumerate(lengths)
    ]
    found = _widths([cells], columns, available)
    needed = [max(1, length) for length, _ in lengths]
    gaps = 2 * (len(columns) - 1)
    if sum(needed) + gaps <= available:
        assert found == needed
        return
    for width, need, column in zip(found, needed, columns, strict=True):
        assert width == need if not column.flexible else min(8, need) <= width <= need
    cannot = all(width <= 8 for width, column in zip(found, columns, strict=True) if column.flexible)
    assert sum(found) + gaps == available or cannot


@pytest.mark.parametrize(
    ("devices", "available", "shown"),
    [
        (["NVIDIA H200", "NVIDIA H200"], 60, "MODEL STATE"),  # nothing to tell apart
        (["NVIDIA H200", "NVIDIA H100"], 60, "MODEL STATE DEVICE"),
        (["NVIDIA H200", "NVIDIA H100"], 100, "MODEL STATE DEVICE"),
        (["NVIDIA H200", "NVIDIA H100"], 26, "MODEL STATE"),  # both would be cut to `NVIDIA `
        (["NVIDIA H200", "AMD EPYC"], 26, "MODEL STATE DEVICE"),
        (["NVIDIA H200", "AMD EPYC"], 24, "MODEL STATE"),  # no room
        (["NVIDIA H200", "AMD EPYC", "NVIDIA H200"], 30, "MODEL STATE"),  # two models would look the same
        (["NVIDIA H200", "AMD EPYC", "NVIDIA H200"], 36, "MODEL STATE DEVICE"),
    ],
)
def test_columns_in_which_rows_differ(devices: list[str], available: int, shown: str) -> None:
    """On a terminal too narrow for it, a column that tells rows apart is shown where there is room for telling."""
    models = ("torchvision:resnet18", "torchvision:resnet18", "torchvision:vgg16")
    rows = [{"model": model, "device": device} for model, device in zip(models, devices, strict=False)]
    columns = [
        Column(header="MODEL", cell=lambda r: r["model"], flexible=True),
        Column(header="STATE", cell=lambda _: "ready"),
        Column(header="DEVICE", cell=lambda r: r["device"], flexible=True, from_width=150, telling=True),
        Column(header="SIZE", cell=lambda r: r["device"], from_width=150),
    ]
    assert " ".join(column.header for column in _shown(rows, columns, available)) == shown


def test_notes_are_wrapped_between_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal; a path that is longer than a line stays whole, an indented reason stays indented."""
    text = "stale: made with another torch\n    /a/path/that/is/longer/than-a-line is damaged"
    output.note(text)
    assert capsys.readouterr().err == f"{text}\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    output.note(text)
    assert capsys.readouterr().err.splitlines() == [
        "stale: made with",
        "another torch",
        "    /a/path/that/is/longer/than-a-line",
        "    is damaged",
    ]


@given(text=st.text(alphabet=st.sampled_from("a \t\n\0\x1b\x7f\x9b\ud800é")))
def test_nothing_printed_steers_a_terminal(text: str) -> None:
    """Escapes for controls and lone surrogates, in text and in JSON, which still reads as the same value."""
    shown = output.visible(text)
    assert all(letter.isprintable() or letter in "\t\n" for letter in shown)
    shown.encode()
    assert json.loads(output.visible(json.dumps([text], ensure_ascii=False))) == [text]
    assert output.visible(shown) == shown


def test_long_lists_are_cut() -> None:
    """A job of many shards has many files; panels name the first ones and count the others."""
    files = [f"part-{i}" for i in range(1009)]
    assert figures.flat({"files": files[:8]}) == [("files", ", ".join(files[:8]))]
    ((_, text),) = figures.flat({"files": files})
    assert text == ", ".join(files[:8]) + " and 1,001 more"


@pytest.mark.parametrize("runs", ["schedule", "eager"])
def test_cache_ls_fits_eighty_columns(runs: str) -> None:
    """The model and the speed are what a reader looks for: the input gives way before them, and nothing else does."""
    row = {
        "key": "ab" * 32,
        "model": "torchvision:resnet18",
        "input": "x:int64[128, 512], mask:bool[128, 1, 512, 512]",
        "bucket": None,
        "dtype": "fp32",
        "mode": "inference",
        "streams": 2,
        "replay_us": 1234.5,
        "speedup": 2.5,
        "runs": runs,
        "bytes": 10**8,
        "hits": 123,
        "last_used_at": figures.iso(NOW),
        "state": "resident",
        "resident": [],
        "device": "NVIDIA H200",
    }
    shown = _shown([row], CACHE_COLUMNS, 80)
    widths = dict(zip([c.header for c in shown], _widths([row], shown, 80), strict=True))
    assert {"KEY", "MODEL", "INPUT", "REPLAY", "SPEED", "STATE"} <= set(widths)
    assert widths["MODEL"] == len(row["model"])
    assert 8 <= widths["INPUT"] < len(row["input"])
    assert sum(widths.values()) + 2 * (len(widths) - 1) <= 80


@given(
    st.lists(
        st.dictionaries(
            st.text(min_size=1, max_size=3),
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            max_size=4,
        )
        | st.just({"deep": [1]}),
        max_size=4,
    )
)
def test_rows_as_json_are_indented_as_any(rows: list[dict[str, object]]) -> None:
    """The quick way to write rows gives the same text, or leaves it to the slow one."""
    assert output._rows(rows) in (None, json.dumps(rows, indent=2, ensure_ascii=False))
    assert output._rows([{"a": 1, "b": None}, {"a": "x\ny"}]) is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x:float32[4, 3, 32, 32]", "4×3×32×32"),
        ("x:int64[4, 7]", "int64 4×7"),
        ("[408] attention_mask, input_ids int32[10]", "408×10 tokens"),
        ("[64] attention_mask, input_ids int32[64], token_type_ids uint8[64]", "64×64 tokens"),
        ("[8] a float32[2], b uint8[3]", "[8] a float32[2], b uint8[3]"),
    ],
)
def test_inputs_are_short(text: str, expected: str) -> None:
    """Stored schedules and those that a worker will build are named in the same way."""
    assert shape(text) == expected
    (column,) = (column for column in CACHE_COLUMNS if column.header == "INPUT")
    assert column.cell({"input": text}) == expected


@pytest.mark.parametrize("width", [80, 120])
def test_sections_without_lines_are_left_out(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal they would be empty boxes."""
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    render.sections([("Job", [("id", "a")]), ("Stages", []), ("Events", [("now", "b")])])
    shown = capsys.readouterr().out
    assert "Job" in shown
    assert "Events" in shown
    assert "Stages" not in shown

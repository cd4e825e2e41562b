"""Reads YAML text into plain values, each with its line.

Values are built from parser events, so nothing is ever constructed by tag. Aliases, anchors, equal keys, merge keys,
foreign tags, several documents and deep nesting are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from nimble_jobs.errors import Problem
from nimble_jobs.spec.scalars import CORE_TAG, resolve, resolve_tagged
from nimble_jobs.spec.units import BadValue, show

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 10_000

Where = tuple[str | int, ...]  # keys and list positions from the root
_STARTS = (yaml.SequenceStartEvent, yaml.MappingStartEvent)
_ENDS = (yaml.SequenceEndEvent, yaml.MappingEndEvent)


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a value was written: a file and a line, or an override (line 0)."""

    file: str
    line: int


@dataclass(slots=True)
class Tree:
    """Plain values with their origins, and the problems so far. Places in `bad` have been reported."""

    value: Any = None
    origins: dict[Where, Origin] = field(default_factory=dict)
    bad: set[Where] = field(default_factory=set)
    _problems: dict[Problem, None] = field(default_factory=dict)  # an ordered set

    def origin(self, where: Where) -> Origin:
        """The origin of a place, or of the nearest place around it."""
        while where not in self.origins and where:
            where = where[:-1]
        return self.origins.get(where, Origin("", 1))

    def report(self, where: Where, problem: str, expected: str = "", *, at: Where | None = None) -> None:
        """Add a problem of the field `where`, on the line of `at` (by default its own)."""
        self.report_at(self.origin(where if at is None else at), where, problem, expected)

    def report_at(self, origin: Origin, where: Where, problem: str, expected: str = "") -> None:
        """Add a problem of the field `where` at `origin`. Equal problems are kept once."""
        entry = Problem(file=origin.file, line=origin.line, field=dotted(where), problem=problem, expected=expected)
        self._problems[entry] = None

    @property
    def problems(self) -> list[Problem]:
        """Everything reported, in that order."""
        return list(self._problems)

    def graft(self, other: Tree) -> None:
        """Take over the origins and problems of a tree that was parsed for a place in this one."""
        self.origins |= other.origins
        self.bad |= other.bad
        self._problems |= other._problems


def dotted(where: Where) -> str:
    """`("input", "mean", 0)` as `input.mean[0]`."""
    text = ""
    for part in where:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = part.isprintable() and part.strip() == part and 0 < len(part) <= 60 and "." not in part
            text += f"{'.' if text else ''}{part if plain else show(part)}"
    return text


def parse(source: bytes | str, file: str, *, line: int | None = None, root: Where = ()) -> Tree:
    """Read one YAML document. Never raises; problems are in the tree.

    `line`, where given, stands for every line; `root` is the place that the document fills in a larger one.
    """
    tree = Tree(origins={root: Origin(file, 1 if line is None else line)})
    try:
        text = _decode(source)
        _Reader(tree, text, file, line).document(root)
    except _Fatal as e:
        tree.origins[root] = Origin(file, e.line if line is None else line)
        tree.report(root, e.problem, e.expected)
        tree.value = None
        tree.bad.add(root)
    return tree


class _Fatal(Exception):
    """Nothing after this point can be read."""

    def __init__(self, line: int, problem: str, expected: str = "") -> None:
        self.line, self.problem, self.expected = line, problem, expected


def _decode(source: bytes | str) -> str:
    try:
        raw = source.encode() if isinstance(source, str) else source
        text = raw.decode()
    except UnicodeEncodeError as e:
        raise _Fatal(1, "not valid text", "UTF-8") from e
    except UnicodeDecodeError as e:
        raise _Fatal(e.object.count(b"\n", 0, e.start) + 1, "not UTF-8", "UTF-8 text") from e
    if len(raw) > MAX_BYTES:
        raise _Fatal(1, f"found {len(raw)} bytes", "at most 1 MiB")
    return text


class _Reader:
    def __init__(self, tree: Tree, text: str, file: str, line: int | None) -> None:
        self.tree, self.text, self.file, self.fixed_line = tree, text, file, line
        self.events: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)
        self.values = 0

    def document(self, root: Where) -> None:
        self.next()  # stream start
        if isinstance(self.next(), yaml.StreamEndEvent):
            return  # an empty text is null, as an empty document is
        event = self.next()
        self.tree.origins[root] = self.origin(event)
        self.tree.value = self.node(event, root, 0)
        self.next()  # document end
        if not isinstance(event := self.next(), yaml.StreamEndEvent):
            self.tree.report_at(self.origin(event), root, "a second document starts here", "one document")

    def next(self) -> Any:
        try:
            return next(self.events)
        except yaml.reader.ReaderError as e:
            line = self.text.count("\n", 0, e.position) + 1
            raise _Fatal(line, f"found the character {chr(e.character)!a}", "printable text") from e
        except yaml.MarkedYAMLError as e:
            mark = e.problem_mark or e.context_mark
            line = mark.line + 1 if mark else 1
            if "'\\t'" in (e.problem or ""):
                raise _Fatal(line, "found a tab", "spaces") from e
            raise _Fatal(line, f"not valid YAML: {_short(e.problem or e.context or 'cannot be read')}") from e
        except (yaml.YAMLError, ValueError, OverflowError) as e:
            # PyYAML lets errors of chr() and int() through, for an escape beyond Unicode or an odd version.
            raise _Fatal(1, f"not valid YAML: {_short(str(e))}") from e

    def origin(self, event: Any) -> Origin:
        return Origin(self.file, event.start_mark.line + 1 if self.fixed_line is None else self.fixed_line)

    def node(self, event: Any, where: Where, depth: int) -> Any:
        self.limit(event, depth)
        self.tree.origins.setdefault(where, self.origin(event))
        if isinstance(event, yaml.AliasEvent):
            return self.refuse(event, where, f"found the alias *{_short(str(event.anchor))}", "the value itself")
        if event.anchor is not None:
            self.tree.report_at(
                self.origin(event), where, f"found the anchor &{_short(event.anchor)}", "no anchors or aliases"
            )
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, where)
        allowed = (None, "!", CORE_TAG + ("seq" if isinstance(event, yaml.SequenceStartEvent) else "map"))
        if event.tag not in allowed:
            self.skip(event)
            return self.refuse(
                event, where, f"found the tag {_short(event.tag.replace(CORE_TAG, '!!'))}", "a value without a tag"
            )
        return self.sequence(where, depth) if isinstance(event, yaml.SequenceStartEvent) else self.mapping(where, depth)

    def limit(self, event: Any, depth: int) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            raise _Fatal(event.start_mark.line + 1, "too many values", f"at most {MAX_VALUES}")
        if depth > MAX_DEPTH:
            raise _Fatal(event.start_mark.line + 1, "nested too deeply", f"at most {MAX_DEPTH} levels")

    def refuse(self, event: Any, where: Where, problem: str, expected: str) -> None:
        self.tree.report_at(self.origin(event), where, problem, expected)
        self.tree.bad.add(where)

    def scalar(self, event: Any, where: Where) -> Any:
        text: str = event.value
        try:
            _check_text(text)
            if event.tag is not None:
                return resolve_tagged(text, event.tag)
            return resolve(text) if event.implicit[0] else text
        except BadValue as e:
            return self.refuse(event, where, e.problem, e.expected)

    def sequence(self, where: Where, depth: int) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := self.next(), yaml.SequenceEndEvent):
            items.append(self.node(event, (*where, len(items)), depth + 1))
        return items

    def mapping(self, where: Where, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := self.next(), yaml.MappingEndEvent):
            if (key := self.key(event, where, items)) is None:
                self.skip(event)
                self.skip(self.next())
                continue
            self.tree.origins[(*where, key)] = self.origin(event)
            items[key] = self.node(self.next(), (*where, key), depth + 1)
        return items

    def key(self, event: Any, where: Where, items: dict[str, Any]) -> str | None:
        """The text of a key as written, `on` and `1` too, or None if it was refused."""
        problem = expected = ""
        if not isinstance(event, yaml.ScalarEvent) or event.tag not in (None, "!", f"{CORE_TAG}str"):
            problem, expected = "found a key that is not plain text", "a field's name"
        elif event.value == "<<" and event.implicit[0]:
            problem, expected = "found a merge key", "the fields themselves"
        elif event.anchor is not None:
            problem, expected = f"found the anchor &{_short(event.anchor)}", "no anchors or aliases"
        elif event.value in items:
            first = self.tree.origins[(*where, event.value)].line
            where = (*where, event.value)
            problem, expected = f"given twice, first on line {first}", "one value"
        else:
            try:
                _check_text(event.value)
                return str(event.value)
            except BadValue as e:
                problem, expected = e.problem, e.expected
        self.tree.report_at(self.origin(event), where, problem, expected)
        return None

    def skip(self, event: Any) -> None:
        level = int(isinstance(event, _STARTS))
        while level:
            event = self.next()
            level += isinstance(event, _STARTS) - isinstance(event, _ENDS)
            self.limit(event, level)


def _short(text: str) -> str:
    text = " ".join(text.split())
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_text(text: str) -> None:
    """Raises BadValue for characters that file names, databases or JSON cannot hold."""
    if any("\ud800" <= c <= "\udfff" or c == "\0" for c in text):
        raise BadValue("found text with a character that cannot be stored", "ordinary text")

"""What processes are asked and what they answer: the same after the way through a socket, whole or in parts."""

from __future__ import annotations

import json
import os

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.chance import RandomCrops
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.decoding.work import BAD, GOOD, STATUS, Answer, Files, Row, Work, signed

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
NAMES = st.binary(min_size=1, max_size=20).filter(lambda name: b"\0" not in name)
RECIPES = st.sampled_from(
    [
        Recipe(channels=3, resize=(8, 8), center_crop=None, size=(8, 8)),
        Recipe(channels=1, resize=None, center_crop=(5, 4), size=(5, 4)),
    ]
)
CROPS = RandomCrops(seed=1, epoch=2, scale=(0.1, 1.0), ratio=(0.75, 1.5), first=3)


@st.composite
def works(draw: st.DrawFn) -> Work:
    names = draw(st.lists(NAMES, max_size=6))
    count = len(names)
    table = np.array(draw(st.lists(NUMBERS, min_size=5 * count, max_size=5 * count)), dtype=np.int64).reshape(count, 5)
    crops = draw(st.sampled_from([None, CROPS]))
    files = Files(
        before=draw(st.sampled_from(["", "/a b/", os.fsdecode(b"/\xff\xfe/")])),
        names=b"\0".join(names),
        facts=table[:, 2:],
    )
    return Work(
        recipe=draw(RECIPES),
        places=table[:, :2],
        files=draw(st.sampled_from([None, files])),
        encoded=draw(st.booleans()),
        crops=crops,
        indexes=None if crops is None else table[:, 4],
    )


def same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def equal(one: Work, other: Work) -> bool:
    if (one.recipe, one.encoded, one.crops, one.files is None) != (
        other.recipe,
        other.encoded,
        other.crops,
        other.files is None,
    ):
        return False
    if one.files is not None and other.files is not None and one.files.paths != other.files.paths:
        return False
    facts = [None if work.files is None else work.files.facts for work in (one, other)]
    return same(*facts) and same(one.places, other.places) and same(one.indexes, other.indexes)


@given(works())
def test_a_work_survives_the_way_to_a_process(work: Work) -> None:
    message, blobs = work.packed()
    assert message["packed"] == len(blobs)
    assert equal(Work.unpacked(json.loads(json.dumps(message)), blobs), work)


@given(works(), st.integers(0, 6), st.integers(0, 6))
def test_parts_are_the_pictures_between_two_positions(work: Work, start: int, stop: int) -> None:
    part = work.part(start, stop)
    assert same(part.places, work.places[start:stop])
    assert same(part.indexes, None if work.indexes is None else work.indexes[start:stop])
    if work.files is not None and part.files is not None:
        assert part.files.paths == work.files.paths[start:stop]
        assert same(part.files.facts, work.files.facts[start:stop])


def test_results_move_as_a_whole() -> None:
    work = Work(
        recipe=Recipe(channels=3, resize=None, center_crop=None, size=(1, 1)), places=np.array([[0, 9], [9, 9]])
    )
    assert work.moved(100).places.tolist() == [[100, 9], [109, 9]]


ROWS = st.builds(
    Row,
    status=st.sampled_from([GOOD, BAD]),
    reason=st.sampled_from(["", "cannot be decoded: ä\ud83d"]),
    length=st.integers(0, 1 << 40),
    height=st.integers(0, 65535),
    width=st.integers(0, 65535),
    alike=st.integers(0, (1 << 63) - 1),
)


@given(st.lists(st.lists(ROWS, max_size=4), min_size=1, max_size=4))
def test_answers_survive_the_way_back_and_are_joined_in_order(parts: list[list[Row]]) -> None:
    answers = []
    for part in parts:
        message, blobs = Answer.of(part, 0.5).packed()
        answers.append(Answer.unpacked(json.loads(json.dumps(message)), blobs))
    whole, rows = Answer.joined(answers), [row for part in parts for row in part]
    expected = [[row.status, row.length, row.height, row.width, row.alike] for row in rows]
    assert whole.rows.tolist() == expected
    assert whole.reasons == {i: row.reason for i, row in enumerate(rows) if row.reason}
    assert whole.busy_s == 0.5 * len(parts)
    assert whole.rows[:, STATUS].tolist() == [row.status for row in rows]


@given(st.integers(0, (1 << 64) - 1))
def test_inodes_of_all_file_systems_fit(inode: int) -> None:
    assert -(1 << 63) <= signed(inode) < 1 << 63
    assert signed(inode) % (1 << 64) == inode

"""Rows of bytes that hold several inputs each."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nimble_jobs.engine.inputs import draw
from nimble_jobs.models.call_arguments import Call
from nimble_jobs.models.packed import Packed
from nimble_jobs.packing import ROW_BYTES, Layout, Part, layout_of_words, part_of_words, text_layout
from nimble_jobs.preprocess import BITS, FLOATS, of_words

CPU = torch.device("cpu")
LETTERS = "abcdefgh"


class Given(nn.Module):
    """Returns its arguments."""

    def forward(self, **arguments: Any) -> dict[str, Any]:
        return arguments


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A few parts of any type and shape."""
    parts = []
    for name in draw(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=6, unique=True)):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        dtype = draw(st.sampled_from([*BITS, *FLOATS]))
        make = draw(st.sampled_from(["value", "value", "mask_right", "mask_left"]))
        if make != "value":
            parts.append(Part(path=name, shape=(draw(st.integers(1, 9)),), make=make))
            continue
        gives: Any = "float" if dtype in FLOATS else "bool" if dtype == "bool" else "integer"
        parts.append(Part(path=name, shape=shape, dtype=dtype, gives=gives))
    return Layout(tuple(parts))


def values_of(layout: Layout, count: int, seed: int) -> dict[str, np.ndarray]:
    """Random stored values of any bits that their types have."""
    random, made = np.random.default_rng(seed), {}
    for part in layout.parts:
        shape = (count, *part.stored)
        if part.is_made:
            made[part.path] = random.integers(0, part.shape[0] + 1, shape).astype(part.dtype)
        elif part.dtype in FLOATS:
            made[part.path] = random.standard_normal(shape).astype(part.dtype)
        else:
            low, high = BITS[part.dtype]
            made[part.path] = (
                random.integers(low, high, shape, dtype=part.dtype if low else np.dtype(part.dtype), endpoint=True)
                if part.dtype != "bool"
                else random.integers(0, 2, shape).astype(bool)
            )
    return made


@given(layouts(), st.integers(1, 4), st.integers(0, 99))
def test_what_is_packed_is_unpacked_on_the_host_and_on_the_device(layout: Layout, count: int, seed: int) -> None:
    """numpy finds the same values again; the module makes arguments of them whose values are numpy's."""
    values = values_of(layout, count, seed)
    rows = layout.pack(values)
    assert rows.shape == (count, layout.nbytes)
    for path, found in layout.unpack(rows).items():
        np.testing.assert_array_equal(found, values[path])
    arguments = Packed(Given(), layout, torch.float32, CPU)(torch.from_numpy(rows))
    assert arguments.keys() == values.keys()
    for part in layout.parts:
        stored, tensor = values[part.path], arguments[part.path]
        assert tensor.is_contiguous()
        assert tensor.shape == (count, *part.result)
        if part.is_made:
            places = np.arange(part.shape[0])
            right = places < stored[:, None]
            wanted = right if part.make == "mask_right" else places >= part.shape[0] - stored[:, None]
            np.testing.assert_array_equal(tensor.numpy(), wanted.astype(np.int64))
        else:
            kind = {"float": np.float32, "integer": np.int64, "bool": np.bool_}[part.gives]
            np.testing.assert_array_equal(tensor.numpy(), stored.astype(kind))


@given(layouts())
def test_each_part_of_each_row_is_aligned(layout: Layout) -> None:
    """So that the device may read it in its own type."""
    assert layout.nbytes % ROW_BYTES == 0
    ends = []
    for part in layout.parts:
        assert layout.offset(part.path) % np.dtype(part.dtype).itemsize == 0
        ends.append((layout.offset(part.path), layout.offset(part.path) + layout.dtype[part.path].itemsize))
    for (_, end), (begin, _) in pairwise(ends):
        assert end <= begin


@given(layouts())
def test_words_say_all_of_a_layout(layout: Layout) -> None:
    """A layout comes back from them, whatever order they are in."""
    words = layout.words
    assert layout_of_words(words) == layout
    assert layout_of_words(dict(reversed(words.items()))) == layout


def test_words_can_be_read() -> None:
    """One line a part, with bounds and steps."""
    steps = of_words((4, 5, 3), "uint8", "hwc, /255, mean 0.5")
    image = Part(path="x.image", shape=(4, 5, 3), dtype="uint8", gives="float", preprocess=steps)
    layout = Layout((image, *text_layout(8, vocabulary=300, token_types=True, mask="mask_left").parts))
    assert layout.words == {
        "attention_mask": "mask_left[8] integer",
        "input_ids": "int32[8] integer below 300",
        "token_type_ids": "uint8[8] integer below 2",
        "x.image": "uint8[4, 5, 3] float: hwc, /255, mean 0.5",
    }
    assert layout.text == "attention_mask, input_ids int32[8], token_type_ids uint8[8], x.image uint8[4, 5, 3]"
    assert layout_of_words(layout.words) == layout


def test_all_that_changes_a_program_or_its_checks_changes_the_words() -> None:
    """Type, shape, what the model gets, masks, bounds."""
    parts = [
        Part(path="a", shape=(4,), dtype="int32"),
        Part(path="a", shape=(5,), dtype="int32"),
        Part(path="a", shape=(4,), dtype="int64"),
        Part(path="a", shape=(4,), dtype="int32", below=7),
        Part(path="a", shape=(4,), dtype="float32", gives="float"),
        Part(path="a", shape=(4,), make="mask_right"),
        Part(path="a", shape=(4,), make="mask_left"),
        Part(path="a", shape=(4,), make="mask_left", gives="bool"),
    ]
    assert len({part.words for part in parts}) == len(parts)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": "a b"}, "'a b' names no argument"),
        ({"path": "a."}, "'a.' names no argument"),
        ({"dtype": "uint64"}, "a: no type in which records cross: 'uint64'"),
        ({"shape": (3, 0)}, r"a: records have shape \[3, 0\]; expected at least one value"),
        ({"make": "mask_left", "shape": ()}, "a: a mask is one row of flags, stored as a length of type int32"),
        ({"make": "mask_left", "gives": "float"}, "a: a mask is one row of flags"),
        ({"gives": "bool"}, "a: booleans are stored as booleans, not as int32"),
        ({"dtype": "float32"}, "a: whole numbers cannot be stored as float32"),
        ({"gives": "float"}, "a: int32 becomes fractions only through a preprocessing"),
        ({"below": 0}, "a: only whole numbers have a bound, of at least 1"),
        ({"dtype": "float32", "gives": "float", "below": 3}, "a: only whole numbers have a bound"),
        ({"preprocess": of_words((3,), "uint8", "/255")}, r"a: its preprocessing takes uint8 \[3\]"),
        ({"preprocess": of_words((4,), "int32", "/255")}, "a: its preprocessing does not give integer"),
    ],
)
def test_parts_that_cannot_be(given: dict[str, Any], said: str) -> None:
    """Each says what is wrong with it."""
    fields: dict[str, Any] = {"path": "a", "shape": (4,), "dtype": "int32"}
    with pytest.raises(ValueError, match=said):
        Part(**{**fields, **given})


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([], "no argument is given"),
        (["a", "a"], "a is given twice"),
        (["a", "a.b"], r"a is given both as a whole and in parts: a\.b"),
        (["a.1"], "the entries of a are 1; expected either names, or positions counted from 0"),
        (["a.0", "a.b"], "the entries of a are 0, b; expected either names"),
        (["1"], "the positional arguments are 1; expected either names, or positions counted from 0"),
    ],
)
def test_paths_that_cannot_be_given_to_one_call(paths: list[str], said: str) -> None:
    """Each says what is wrong with them."""
    with pytest.raises(ValueError, match=said):
        Layout(tuple(Part(path=path, shape=(1,), dtype="int32") for path in paths))


@pytest.mark.parametrize("words", ["", "int32", "int32[x] integer", "int32[3] number", "complex64[3] float"])
def test_words_that_are_no_part(words: str) -> None:
    """They are refused."""
    with pytest.raises(ValueError, match=r"no part of a row|no type in which"):
        part_of_words("a", words)


def test_arguments_are_nested_as_their_paths_say() -> None:
    """Positions make positional arguments and lists, names make dicts."""
    t = [torch.tensor(i) for i in range(6)]
    paths = ["1.b", "0", "x.p.1", "x.p.0", "x.q", "y"]
    assert Call.of_paths(paths).filled(dict(zip(paths, t, strict=True))) == (
        [t[1], {"b": t[0]}],
        {"x": {"p": [t[3], t[2]], "q": t[4]}, "y": t[5]},
    )


def test_images_are_preprocessed_part_by_part() -> None:
    """As they are when they are the only input."""
    steps = of_words((4, 5, 3), "uint8", "hwc, resize 2x2, /255, mean 0.5, std 0.25")
    image = Part(path="image", shape=(4, 5, 3), dtype="uint8", gives="float", preprocess=steps)
    layout = Layout((image, Part(path="age", shape=(), dtype="float32", gives="float")))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3)).astype(np.uint8)
    rows = torch.from_numpy(layout.pack({"image": pixels, "age": np.array([1.5, 2.5])}))
    module = Packed(Given(), layout, torch.float16, CPU)
    found = module(rows)
    assert {name: tensor.dtype for name, tensor in found.items()} == {"age": torch.float16, "image": torch.float16}
    wanted = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    wanted = nn.functional.interpolate(wanted, size=(2, 2), mode="bilinear", antialias=True) / 255
    torch.testing.assert_close(found["image"].float(), (wanted - 0.5) / 0.25, atol=1e-2, rtol=1e-2)
    assert not list(module.state_dict())


def rows_of(layout: Layout, turn: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(3)
    drawn = draw((64, layout.nbytes), torch.uint8, layout, generator=generator, turn=turn, scale=scale)
    return layout.unpack(drawn.numpy())


def test_checks_draw_rows_that_a_model_can_take() -> None:
    """Numbers below their bounds; masks that are full, of one token, and of random lengths; scaled fractions."""
    extra = (
        Part(path="own_mask", dtype="uint8", shape=(4,)),
        Part(path="age", shape=(2,), dtype="float64", gives="float"),
    )
    layout = Layout((*text_layout(9, vocabulary=5, token_types=True).parts, *extra))
    lengths = [rows_of(layout, turn)["attention_mask"] for turn in range(4)]
    assert (lengths[1] == 9).all()
    assert (lengths[2] == 1).all()
    assert all(
        len(set(found.tolist())) > 4 and found.min() >= 1 and found.max() <= 9 for found in (lengths[0], lengths[3])
    )
    assert set(rows_of(layout, 0)["input_ids"].reshape(-1).tolist()) == set(range(5))
    right, left, random, full = (rows_of(layout, turn)["own_mask"].astype(int) for turn in range(4))
    assert (np.diff(right, axis=1) <= 0).all()
    assert (full == 1).all()
    assert 0.3 < random.mean() < 0.7
    assert random.any(axis=1).all()
    assert (np.diff(left, axis=1) >= 0).all()
    assert 90 < rows_of(layout, 0, 100.0)["age"].std() < 110


def test_a_compiler_takes_the_module_whole() -> None:
    """Otherwise no compiled kernels could be tried."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.image = nn.Embedding(50, 4), nn.Conv2d(3, 4, 3)

        def forward(self, image: Any, meta: Any, mask: Any) -> dict[str, Any]:
            text = self.words(meta["ids"]) * mask.unsqueeze(-1)
            return {"sum": self.image(image).mean((2, 3)) + text.sum(1), "age": [meta["age"]]}

    steps = of_words((8, 8, 3), "uint8", "hwc, /255, mean 0.5")
    parts = (
        Part(path="image", shape=(8, 8, 3), dtype="uint8", gives="float", preprocess=steps),
        Part(path="meta.ids", shape=(6,), dtype="uint16", below=50),
        Part(path="meta.age", shape=(), dtype="float64", gives="float"),
        Part(path="mask", shape=(6,), make="mask_left"),
    )
    layout = Layout(parts)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        module = Packed(Model().to(memory_format=memory_format), layout, torch.float32, CPU).eval()  # type: ignore[call-overload]
        rows = torch.from_numpy(layout.pack(values_of(layout, 2, 0) | {"meta.ids": np.full((2, 6), 7)}))
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, dynamic=False, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(rows), module(rows))
            image = module.arguments(rows)["image"]
        assert image.is_contiguous(memory_format=memory_format)


def test_the_modes_of_the_model_stay_as_they_are() -> None:
    """Also those of its parts, one of which may train."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model.eval()
    model[1].train()
    layout = Layout((Part(path="input", shape=(2,), dtype="float32", gives="float"),))
    packed = Packed(model, layout, torch.float32, CPU)
    assert not packed.training
    assert [module.training for module in model.modules()] == [False, False, True]
    assert list(packed.state_dict()) == ["model.0.weight", "model.0.bias"]

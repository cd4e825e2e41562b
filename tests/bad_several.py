"""Specs with mistakes about models with several inputs, and the exact lines that each must give."""

# ruff: noqa: E501 - each message stands on one line, as it is printed

from __future__ import annotations

from tests.bad_specs import FINETUNE, SCORE, BadSpec, edit

FIELDS = "fields: {x: images, id: ids, label: labels}"


def mapping(x: str, *changes: tuple[str, str], base: str = SCORE) -> str:
    """The spec with something else as `input.fields.x`, on line 10."""
    return edit((FIELDS, f"fields: {{x: {x}, id: ids, label: labels}}"), *changes, base=base)


OF_X = [
    BadSpec(name=name, text=mapping(x), messages=(f"{{file}}:10: input.fields.x: {said}",))
    for name, x, said in (
        ("a number", "3", "found 3; expected text, or a mapping from the model's arguments to names"),
        (
            "a list of numbers",
            "[1, 2]",
            "found a list; expected text, or a mapping from the model's arguments to names",
        ),
        ("nothing", "null", "is empty; expected text, or a mapping from the model's arguments to names"),
        ("an empty name", "''", "found ''; expected text that is not empty"),
        (
            "an empty mapping",
            "{}",
            "found an empty mapping; expected the model's arguments, each with an array or a column",
        ),
        ("a number as a column", "{image: 3}", "image: found 3; expected the name of an array or a column"),
        ("nothing as a column", "{image: null}", "image: is empty; expected the name of an array or a column"),
        ("an empty column", "{image: ''}", "image: found ''; expected the name of an array or a column"),
        ("a list as a column", "{image: [a, b]}", "image: found a list; expected the name of an array or a column"),
        (
            "a mapping as a column",
            "{image: {column: a}}",
            "image: found a mapping; expected the name of an array or a column",
        ),
        (
            "an argument with a space",
            "{'an image': a}",
            "'an image' names no argument; expected a name such as x, or a dotted one such as x.a",
        ),
        (
            "an argument that ends in a dot",
            "{image.: a}",
            "'image.' names no argument; expected a name such as x, or a dotted one such as x.a",
        ),
        (
            "an argument that begins with a dot",
            "{.image: a}",
            "'.image' names no argument; expected a name such as x, or a dotted one such as x.a",
        ),
        (
            "an argument with a dash",
            "{my-image: a}",
            "'my-image' names no argument; expected a name such as x, or a dotted one such as x.a",
        ),
        (
            "an empty argument",
            "{'': a}",
            "'' names no argument; expected a name such as x, or a dotted one such as x.a",
        ),
        (
            "a whole and its part",
            "{x: a, x.y: b}",
            "x is given both as a whole and in parts: x.y; expected each argument once",
        ),
        (
            "a list that begins at one",
            "{x.1: a}",
            "the entries of x are 1; expected either names, or positions counted from 0",
        ),
        (
            "a list with a hole",
            "{x.0: a, x.2: b}",
            "the entries of x are 0, 2; expected either names, or positions counted from 0",
        ),
        (
            "positions and names in one argument",
            "{x.0: a, x.y: b}",
            "the entries of x are 0, y; expected either names, or positions counted from 0",
        ),
        (
            "a second positional argument without a first",
            "{'1': a}",
            "the positional arguments are 1; expected either names, or positions counted from 0",
        ),
    )
]
BAD_SEVERAL = [
    *OF_X,
    *(
        BadSpec(name=name, text=text, messages=(f"{{file}}:{said}",))
        for name, text, said in (
            (
                "a training with several inputs",
                mapping("{image: a}", base=FINETUNE),
                "10: input.fields.x: not supported yet; expected one array or column if kind is finetune",
            ),
            (
                "several inputs in one array",
                mapping("{image: a}", ("format: npz", "format: npy"), ("digits.npz", "digits.*")),
                "10: input.fields.x: found a mapping, but input.format is npy: the file holds one array; expected none, or format npz, parquet or csv",
            ),
            (
                "several inputs in a folder of images",
                mapping("{image: a}", ("format: npz", "format: images"), ("digits.npz", "scans")),
                "10: input.fields.x: found a mapping, but input.format is images: the files are one input; expected none, or format npz, parquet or csv",
            ),
            (
                "pictures of several inputs decoded by a GPU",
                mapping(
                    "{image: a}",
                    ("format: npz", "format: parquet"),
                    ("digits.npz", "digits.*"),
                    ("  batch_size: 64", "  decode: gpu"),
                ),
                "11: input.decode: found gpu, but input.fields.x is a mapping, whose pictures the CPU decodes; expected cpu or auto",
            ),
            (
                "an argument twice",
                mapping("{image: a, image: b}"),
                "10: input.fields.x.image: given twice, first on line 10; expected one value",
            ),
            (
                "an id that is the label, beside several inputs",
                mapping("{image: a}", ("label: labels", "label: ids")),
                "10: input.fields.label: 'ids' is given twice; expected different arrays or columns",
            ),
        )
    ),
]

"""JSON against a schema: what fits, and the sentence for what does not."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.serving.predict.request import InvalidRequest, parse, read, response_table
from armillary.serving.predict.schema import Field, Schema, Shape


def schema(*fields: tuple[str, str, Shape | None], **more: Any) -> Schema:
    inputs = tuple(Field(name=name, dtype=dtype, shape=shape) for name, dtype, shape in fields)
    out = (Field(name="output", dtype="float32", shape=(None, 2)),)
    return Schema(**{"inputs": inputs, "outputs": out, "batched": True} | more)


FOUR = schema(("x", "float32", (None, 4)))


@pytest.mark.parametrize(
    ("body", "shape", "single"),
    [
        ({"features": [1, 2.5, 3, 4]}, (1, 4), True),
        ({"features": [[1, 2, 3, 4]]}, (1, 4), False),
        ({"features": [[1, 2, 3, 4], [5, 6, 7, 8]]}, (2, 4), False),
        ({"inputs": {"x": [1, 2, 3, 4]}}, (1, 4), True),
    ],
)
def test_a_row_and_rows(body: dict[str, Any], shape: tuple[int, ...], single: bool) -> None:
    found = read(body, FOUR, max_rows=10)
    assert found.arrays[0].shape == shape and found.arrays[0].dtype == np.float32
    assert found.single is single and found.rows == shape[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"features": [1, 2, 3]}, "x: got shape [3], want a row of shape [4], or a list of such rows (float32)"),
        ({"features": [[1, 2, 3, 4], [1, 2]]}, "x: rows of different lengths"),
        ({"features": ["a", "b", "c", "d"]}, "x: want numbers (float32 [any, 4])"),
        ({"features": [True, False, True, True]}, "x: want numbers"),
        ({"features": None}, "x: want numbers"),
        ({"features": [1, 2, 3, None]}, "x: want numbers"),
        ({"features": []}, "x: got shape [0]"),
        ({"features": [[1, 2, 3, 4]] * 11}, "11 rows; send from 1 to 10"),
        ({"features": [1e39, 0, 0, 0]}, "x: a number beyond the range of float32"),
        ({"features": {"a": 1}}, "x: want numbers"),
        ({"inputs": {"y": [1, 2, 3, 4]}}, "no input 'y'; did you mean x?"),
        ({"inputs": {}}, "input 'x' is missing"),
        ({"inputs": [1]}, "neither features nor inputs given alone"),
        ({"data": [1]}, "unknown key 'data'"),
        ({}, "neither features nor inputs"),
        ({"features": [1, 2, 3, 4], "inputs": {}}, "neither features nor inputs given alone"),
    ],
)
def test_what_does_not_fit_is_said(body: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body, FOUR, max_rows=10)
    assert words in str(caught.value)


def test_whole_numbers_are_not_rounded_and_keep_their_range() -> None:
    pixels = schema(("pixels", "uint8", (None, 2)))
    assert read({"features": [0, 255]}, pixels, max_rows=1).arrays[0].tolist() == [[0, 255]]
    for wrong in ([0, 256], [-1, 0], [0.5, 1], [1.0, 2.0], [2**70, 0]):
        with pytest.raises(InvalidRequest, match=r"pixels: (want whole numbers|values beyond 0 to 255)"):
            read({"features": wrong}, pixels, max_rows=1)
    assert read({"features": [True, False]}, schema(("m", "bool", (None, 2))), max_rows=1).arrays[0].dtype == bool


def test_free_dims_and_several_inputs() -> None:
    two = schema(("ids", "int64", (None, None)), ("mask", "bool", (None, None)))
    found = read({"inputs": {"mask": [[True, True]], "ids": [[1, 2]]}}, two, max_rows=9)
    assert [array.dtype.name for array in found.arrays] == ["int64", "bool"]
    with pytest.raises(InvalidRequest, match="this model has 2 inputs"):
        read({"features": [1]}, two, max_rows=9)
    with pytest.raises(InvalidRequest, match="different numbers of rows"):
        read({"inputs": {"mask": [[True]], "ids": [[1], [2]]}}, two, max_rows=9)


def test_unknown_shapes_take_a_list_as_a_row() -> None:
    anything = schema(("x", "float32", None))
    assert read({"features": [1, 2, 3]}, anything, max_rows=9).arrays[0].shape == (1, 3)
    assert read({"features": [[1, 2, 3]] * 2}, anything, max_rows=9).arrays[0].shape == (2, 3)


def test_models_without_rows_take_and_give_the_whole() -> None:
    whole = schema(("x", "float32", (3, 4)), batched=False)
    found = read({"features": [[0, 0, 0, 0]] * 3}, whole, max_rows=9)
    assert found.arrays[0].shape == (3, 4)
    assert response_table(found, [np.zeros((5,), dtype=np.float32)], whole) == {"prediction": [0.0] * 5}
    with pytest.raises(InvalidRequest, match=r"want \[3, 4\]"):
        read({"features": [0, 0, 0, 0]}, whole, max_rows=9)


def test_answers_have_the_form_of_the_question() -> None:
    one = read({"features": [1, 2, 3, 4]}, FOUR, max_rows=9)
    many = read({"features": [[1, 2, 3, 4]]}, FOUR, max_rows=9)
    output = np.array([[1.5, np.nan]], dtype=np.float32)
    assert response_table(one, [output], FOUR) == {"prediction": [1.5, None]}
    assert response_table(many, [output], FOUR) == {"prediction": [[1.5, None]]}
    assert response_table(one, [np.array([7])], FOUR) == {"prediction": [7]}
    named = read({"inputs": {"x": [1, 2, 3, 4]}}, FOUR, max_rows=9)
    assert response_table(named, [output], FOUR) == {"outputs": {"output": [1.5, None]}}


def test_texts_among_numbers_take_no_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="want numbers"):
            read({"features": ["x" * 100_000, *["a"] * 200]}, FOUR, max_rows=9)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # numpy would take 80 MB: all as long as the longest
    finally:
        tracemalloc.stop()


DEEP = b'{"features":' + b"[" * 50_000


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"features": [NaN]}', b"\xff\xfe", DEEP])
def test_bodies_that_are_no_requests(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the body is not"):
        parse(body)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@given(VALUES, st.sampled_from(["float32", "int64", "uint8", "bool", "bfloat16"]), st.booleans())
def test_any_json_is_taken_or_refused_in_words(value: Any, dtype: str, batched: bool) -> None:
    try:
        found = read({"features": value}, schema(("x", dtype, (None, 2)), batched=batched), max_rows=10)
    except InvalidRequest as error:
        assert str(error)
    else:
        assert found.arrays[0].shape[1:] == (2,)

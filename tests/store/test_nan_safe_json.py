"""JSON any reader accepts, with nothing lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.errors import BadData, NotFound
from armillary.store import nan_safe_json

TEXTS = st.text().filter(lambda text: text not in ("nan", "inf", "-inf"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@given(VALUES)
def test_what_is_written_comes_back_and_is_strict_json(value: Any) -> None:
    text = nan_safe_json.dumps(value)
    json.loads(text, parse_constant=refuse)
    assert same(nan_safe_json.loads(text), value)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def test_numpy_scalars_tuples_and_paths() -> None:
    value = {"loss": np.float32(0.5), "step": np.int64(3), "nan": np.float32("nan"), "at": Path("a/b"), "pair": (1, 2)}
    assert nan_safe_json.dumps(value) == '{"loss":0.5,"step":3,"nan":"nan","at":"a/b","pair":[1,2]}'


def test_anything_else_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        nan_safe_json.dumps({"x": {1, 2}})


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no file .*a\.json"):
        nan_safe_json.read(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('{"a": ')
    with pytest.raises(BadData, match=r"b\.json is not readable JSON .*; restore it or delete it$"):
        nan_safe_json.read(tmp_path / "b.json")
    (tmp_path / "c.json").write_text("[1]")
    with pytest.raises(BadData, match=r"c\.json holds a list instead of a JSON object"):
        nan_safe_json.read_table(tmp_path / "c.json")
    with pytest.raises(BadData, match=r"cannot be read \(Is a directory\); check its type"):
        nan_safe_json.read(tmp_path)

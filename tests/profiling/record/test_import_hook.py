"""Something done when a module has been imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from armillary.profiling.record.step_detector import after_import


def test_it_waits_for_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_later.py").write_text("number = 3")
    numbers: list[int] = []
    after_import("imported_later", lambda module: numbers.append(module.number))
    finders = len(sys.meta_path)
    importlib.import_module("json")
    assert numbers == []
    module = importlib.import_module("imported_later")
    assert numbers == [3] and module.__spec__.origin == str(tmp_path / "imported_later.py")
    assert len(sys.meta_path) == finders - 1
    after_import("imported_later", lambda module: numbers.append(module.number + 1))
    assert numbers == [3, 4]


def test_a_module_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    after_import("never_there", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("never_there")

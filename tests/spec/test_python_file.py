"""A user's file that fails is the user's to mend, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.errors import BadInput, NotFound
from armillary.spec.python_file import run_python_file


@pytest.mark.parametrize(("text", "says"), [("1 / 0", "ZeroDivisionError"), ("def", "SyntaxError")])
def test_a_file_that_fails(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(BadInput, match=rf"mine\.py fails: {says}"):
        run_python_file(file)
    with pytest.raises(NotFound):
        run_python_file(tmp_path / "none.py")

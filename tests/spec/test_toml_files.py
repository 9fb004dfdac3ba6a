"""Rows parsed one by one are what the whole file parses to."""

import tomllib
from pathlib import Path

import pytest

from armillary.spec import catalogue
from armillary.spec.toml.toml_files import read_rows

FOLDER = Path(catalogue.__file__).parent


def whole(name: str) -> dict[str, dict[str, object]]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))


def test_models_read_one_by_one_are_the_whole_file() -> None:
    assert dict(read_rows(FOLDER / "models.toml")[""]) == whole("models.toml")


def test_hardware_read_row_by_row_is_the_whole_file() -> None:
    groups = read_rows(FOLDER / "hardware.toml", grouped=True)
    read = {group: rows[""] if list(rows) == [""] else dict(rows) for group, rows in groups.items()}
    assert read == whole("hardware.toml")


def test_a_row_with_tables_below_it_and_quoted_names(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text(
        '# head\n["a-1.5"]\nsize = 1\nlist = [\n  [1, 2],\n]\n["a-1.5".rope]\nbase = 2\n[b]\naliases = ["bee"]\n'
    )
    rows = read_rows(path)[""]
    assert rows["a-1.5"] == {"size": 1, "list": [[1, 2]], "rope": {"base": 2}}
    assert rows.find("BEE ") == "b" and rows.find("a-1.5") == "a-1.5" and rows.find("size") is None
    with pytest.raises(KeyError):
        rows["c"]

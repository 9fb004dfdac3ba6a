"""What is installed: every file that the package reads beside its modules."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_data_file_is_installed() -> None:
    package = ROOT / "armillary"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    installed = {path for pattern in settings["package-data"]["armillary"] for path in package.glob(pattern)}
    others = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and not path.name.startswith(".")
    }
    assert package / "kernels" / "native" / "packed_linear.cpp" in others
    assert sorted(str(path.relative_to(package)) for path in others - installed) == []

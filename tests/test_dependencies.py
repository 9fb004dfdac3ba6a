"""Dependencies whose older versions have known vulnerabilities are required in a version that has none.

`pip-audit` finds new ones where it can reach its database; each that concerns this project gets a line here.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

SAFE = {
    "aiohttp": ("3.14.3", "CVE-2026-69244: out-of-bounds read in the parser; CVE-2026-69243: request smuggling"),
    "cryptography": ("50.0.0", "CVE-2026-69247, CVE-2026-39892, CVE-2026-26007"),
    "jinja2": ("3.1.6", "CVE-2025-27516: a template leaves the sandbox"),
    "mlflow": ("3.12", "CVE-2026-2652, CVE-2026-0545"),
    "ray": ("2.52", "CVE-2025-62593: code execution by DNS rebinding"),
    "setuptools": ("78.1.1", "CVE-2025-47273: path traversal"),
    "starlette": ("1.3.1", "CVE-2025-62727: quadratic Range header; CVE-2026-48710 and others"),
}


def requirements() -> list[Requirement]:
    """All of pyproject.toml."""
    table = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    groups = [table["project"]["dependencies"], table["build-system"]["requires"]]
    groups += table["project"]["optional-dependencies"].values()
    return [Requirement(text) for group in groups for text in group]


@pytest.mark.parametrize("name", SAFE)
def test_versions_with_known_vulnerabilities_are_excluded(name: str) -> None:
    safe, why = SAFE[name]
    found = [each for each in requirements() if each.name == name]
    assert found, f"{name} is no dependency any more; remove its line"
    for each in found:
        bounds = [Version(part.version) for part in each.specifier if part.operator in (">=", "==", "~=")]
        assert bounds and max(bounds) >= Version(safe), f"{each} allows {why}"

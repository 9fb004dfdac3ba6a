"""Where the server's packages are missing, its tests are left out, and this says so; and `armillary serve` does too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from armillary.machine.doctor import EXTRAS
from tests.serving.conftest import MISSING


def test_the_servers_packages_are_here() -> None:
    if MISSING:
        pytest.skip(f"no {', '.join(MISSING)}, so the server is not tested: pip install 'armillary[http]'")
    assert {"msgspec", "starlette", "uvicorn"} <= set(EXTRAS["http"])


def test_without_them_the_verb_says_what_to_install(folder: Path) -> None:
    code = f"""import sys
sys.modules |= dict.fromkeys(("uvicorn", "msgspec", "starlette"))
from armillary.cli.main import main
sys.exit(main(["serve", {str(folder)!r}, "--port", "0"]))"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.returncode == 2 and "pip install 'armillary[http]'" in ran.stderr and ran.stderr.count("\n") == 1

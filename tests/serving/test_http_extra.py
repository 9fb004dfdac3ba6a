"""Where the server's packages are missing, `armillary serve` says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from armillary.machine.doctor import EXTRAS


def test_the_extra_names_the_servers_packages() -> None:
    assert {"msgspec", "starlette", "uvicorn"} <= set(EXTRAS["http"])


def test_without_them_the_verb_says_what_to_install(folder: Path) -> None:
    code = f"""import sys
sys.modules |= dict.fromkeys(("uvicorn", "msgspec", "starlette"))
from armillary.cli.main import main
sys.exit(main(["serve", {str(folder)!r}, "--port", "0"]))"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.returncode == 2 and "pip install 'armillary[http]'" in ran.stderr and ran.stderr.count("\n") == 1

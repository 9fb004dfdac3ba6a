"""Runs exercises, puts what they print into their pages, and shows what has changed: make docs EXERCISES="amdahl …".

python docs/run_exercises.py                 all of them, one after the other; up to five minutes each
python docs/run_exercises.py amdahl          one
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "exercises"
LONGEST_S = 300
OTHER_NAMES = {"precision": "precision_cnn", "resnet50": "resnet50_profile"}
"""page -> example, where they differ"""


def example_of(name: str) -> Path:
    return ROOT / "examples" / f"{OTHER_NAMES.get(name, name)}.py"


def names() -> list[str]:
    """Exercises whose example can write its page."""
    return sorted(page.stem for page in PAGES.glob("*.md") if can_write(example_of(page.stem)))


def can_write(example: Path) -> bool:
    text = example.read_text(encoding="utf-8") if example.is_file() else ""
    return "--page" in text or "from exercise import" in text


def run(name: str) -> str:
    """Run one exercise into its page; the difference as text, empty where nothing has changed."""
    page = PAGES / f"{name}.md"
    before = page.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, str(example_of(name)), "--page", str(page)]
        subprocess.run(line, cwd=folder, check=True, timeout=LONGEST_S, stdout=subprocess.DEVNULL)
    after = page.read_text(encoding="utf-8").splitlines()
    return "\n".join(difflib.unified_diff(before, after, "before", "now", n=0, lineterm=""))


def main(wanted: Sequence[str]) -> None:
    known = names()
    for name in known if list(wanted) in ([], ["all"]) else wanted:
        if name not in known:
            sys.exit(f"error: no exercise '{name}'; these can be run: {', '.join(known)}")
        print(f"running {name} …", flush=True)
        print(run(name) or "  nothing has changed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

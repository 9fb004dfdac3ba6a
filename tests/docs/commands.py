"""The commands of README and docs: lines of their code blocks that begin with armillary."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").glob("*.md"))]
SHELL = ("", "bash", "sh", "console", "text")
"""languages of code blocks that hold commands"""
LINE = re.compile(r"^(?:\$ )?armillary (.+)$")
PLACEHOLDERS = {"[STEP]": "10", "A": "10", "B": "20"}
"""what stands for numbers"""


def commands(page: Path) -> Iterator[str]:
    """Such lines, joined where they continue."""
    language: str | None = None
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.strip().startswith("```"):
            language = line.strip()[3:] if language is None else None
        elif language in SHELL and (match := LINE.match(line.strip())):
            yield match[1]


def words_of(line: str) -> list[str]:
    """The words up to a comment, pipe or redirection."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    ends = [i for i, word in enumerate(words) if word in ("|", ">", "&", "&&", "||", "…", "...")]
    return words[: ends[0]] if ends else words


def pages_with_commands() -> list[Path]:
    return [page for page in PAGES if any(commands(page))]

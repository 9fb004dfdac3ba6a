"""The curl lines of the documentation, run as they stand against a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serving.tiny import Server

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are curl lines")


def examples() -> list[tuple[str, str]]:
    """(what the comment above says, the command) of every curl line in README.md, docs/serve.md and docs/tour.md."""
    found, said = list[tuple[str, str]](), ""
    for page in ("README.md", "docs/serve.md", "docs/tour.md"):
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            for command in re.split(r"\n(?=[^ ])", block.strip()):
                if command.startswith("#"):
                    said = command
                elif command.startswith("curl "):
                    found.append((f"{page}: {said}", command))
    return found


@pytest.mark.parametrize(("said", "command"), examples())
def test_the_line_does_what_it_says(server: Server, said: str, command: str) -> None:
    ran = subprocess.run(
        command.replace("http://127.0.0.1:8000", server.url).replace("curl ", "curl -sS -m 60 ", 1),
        shell=True,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    if '"stream": true' in command:
        assert ran.stdout.endswith("data: [DONE]\n\n") and '"usage":{' in ran.stdout
    elif command.endswith("/metrics"):
        assert "armillary_ttft_s_bucket" in ran.stdout
    else:
        assert ("error" in json.loads(ran.stdout)) is ("an error" in said), ran.stdout


def test_there_are_examples_of_everything() -> None:
    text = " ".join(command for _, command in examples())
    paths = (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
    )
    assert all(path in text for path in paths) and any("README" in said for said, _ in examples())


def test_the_chat_page_needs_nothing_from_elsewhere(server: Server) -> None:
    status, text = server.get("/")
    assert status == 200 and "v1/chat/completions" in text and "<script>" in text
    assert "http://" not in text and "https://" not in text and "src=" not in text

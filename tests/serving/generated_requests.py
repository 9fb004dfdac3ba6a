"""Requests that schemathesis makes from an OpenAPI document: values at the bounds of each field, beyond, and random."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def run_schemathesis(
    url: str, paths: str, folder: Path, *, examples: int = 400, change: Callable[[Any], None] = lambda document: None
) -> int:
    """Number of cases, all of which passed. `paths` is a regular expression; `change` edits the document, so that names
    which a server knows are asked for."""
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=60) as answer:
        document = json.load(answer)
    change(document)
    (folder / "openapi.json").write_text(json.dumps(document))
    line = [sys.executable, "-m", "schemathesis.cli", "run", str(folder / "openapi.json"), "--url", url]
    line += ["--checks", CHECKS, "--max-examples", str(examples), "--phases", "coverage,fuzzing", "--no-color"]
    line += ["--request-timeout", "60", "--seed", "1", "--generation-database", "none"]
    line += ["--include-path-regex", f"^({paths})"]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=900, cwd=folder)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    cases = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
    assert cases and cases[1] == cases[2], ran.stdout[-2000:]
    return int(cases[1])

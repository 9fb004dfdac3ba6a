"""`armillary quantize` and `armillary eval`: what they print, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.cli.quantize import FORMATS
from armillary.model.quantizing.quantization_targets import TARGETS
from tests.model.quantizing.tiny_source import write_source, write_text

Cli = Callable[..., Any]


def test_formats_are_those_of_the_library() -> None:
    """The command line lists them without importing torch."""
    assert FORMATS == TARGETS


def test_a_model_is_quantized_and_judged(cli: Cli, tmp_path: Path) -> None:
    folder, text = str(write_source(tmp_path).folder), str(write_text(tmp_path / "text"))
    out = str(tmp_path / "m")
    ran = cli("quantize", folder, out, "--to", "int4-gptq", "--text", text, "--samples", "6", "--device", "cpu")
    assert ran.code == 0, ran.err
    for words in ("perplexity, original", "perplexity, quantized", "KL divergence", "change", "--keep", "down_proj"):
        assert words in ran.out
    again = cli("quantize", folder, out, "--to", "int8", "--text", text, "--device", "cpu")
    assert again.code == 2 and "exists already" in again.err and again.err.count("\n") == 1
    plain = json.loads(cli("eval", folder, "--text", text, "--windows", "8", "--dtype", "fp32", "--json").out)
    assert plain["perplexity"]["low"] < plain["perplexity"]["value"] < plain["perplexity"]["high"]
    judged = cli("eval", out, "--against", folder, "--text", text, "--windows", "16", "--dtype", "fp32", "--json")
    found = json.loads(judged.out)
    assert judged.code == (1 if found["is_worse"] else 0)
    assert found["comparison"]["kl"]["value"] > 0
    assert found["comparison"]["reference"]["value"] > 0
    same = cli("eval", folder, "--against", folder, "--text", text, "--windows", "8", "--dtype", "fp32")
    assert same.code == 0 and "no worse and no better" in same.out


@pytest.mark.parametrize("args", [("--tasks", "arc_easy", "--text", "x"), ("--against", "nowhere")])
def test_wrong_evaluations_are_one_line(args: tuple[str, ...], cli: Cli, tmp_path: Path) -> None:
    ran = cli("eval", str(write_source(tmp_path).folder), *args)
    assert ran.code == 2 and ran.err.count("\n") == 1 and ";" in ran.err

"""Reasoning is split from answers however an output is cut into pieces."""

from __future__ import annotations

import pytest

from armillary.serving.openai.reasoning import reasoning_format_of, reasoning_stream
from armillary.serving.openai.tool_calls import ToolCallText

CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
HM = "<|channel|>analysis<|message|>hm<|end|>"
CASES = [
    ("think", "", "<think>\nhm</think>\n\nyes", ("\nhm", "yes", [])),
    ("think", "assistant\n<think>\n", "hm</think>yes", ("hm", "yes", [])),
    ("think", "", "no tags < at all", ("", "no tags < at all", [])),
    ("think", "", "<think>cut off </thi", ("cut off </thi", "", [])),
    ("harmony", "", f"{HM}<|start|>assistant<|channel|>final<|message|>yes", ("hm", "yes", [])),
    ("harmony", "", f'{HM}{CALL}{{"x": 1}}<|call|>', ("hm", "", ["f"])),
    ("harmony", "", f'{HM}{CALL}{{"x": 1}}', ("hm", "", ["f"])),
    ("harmony", "", f"{CALL}no JSON<|call|>", ("", "no JSON", [])),
    ("harmony", "", "plain text", ("", "plain text", [])),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(("kind", "prompt", "output", "expected"), CASES)
def test_outputs(kind: str, prompt: str, output: str, expected: tuple[str, str, list[str]], size: int) -> None:
    stream = reasoning_stream(kind, prompt, ["f"])
    parts = [stream.push(output[at : at + size]) for at in range(0, len(output), size)] + [stream.finish()]
    calls = [call for part in parts for call in part.calls]
    assert ("".join(p.reasoning for p in parts), "".join(p.text for p in parts), [c.name for c in calls]) == expected
    assert all(call == ToolCallText("f", '{"x": 1}') for call in calls)


def test_formats_of_templates() -> None:
    assert reasoning_format_of(["{{ '<|channel|>' }}<|message|>"]) == "harmony"
    assert reasoning_format_of(["…</think>…"]) == "think" and reasoning_format_of(["plain"]) is None

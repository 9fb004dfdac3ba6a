"""Other people's programs on our files: they must read what we write and say what we say.

Each peer runs as a program of its own that knows nothing of armillary.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.peers

TRANSFORMERS_GREEDY = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
prompt = torch.tensor([json.loads(sys.argv[2])])
made = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
print(json.dumps(made[0, prompt.shape[1]:].tolist()))
"""


@pytest.mark.parametrize("name", ["armillary-2m", "armillary-5m"])
def test_transformers_continues_as_we_do(cli: Callable[..., Any], tmp_path: Path, name: str) -> None:
    folder, prompt = tmp_path / name, [1, 15, 7, 4000]
    assert cli("convert", name, str(folder), "--random-weights", "-q").code == 0
    text = " ".join(map(str, prompt))
    ours = cli("generate", str(folder), text, "--temperature", "0", "--max-tokens", "24", "--device", "cpu", "--json")
    command = [sys.executable, "-c", TRANSFORMERS_GREEDY, str(folder), json.dumps(prompt)]
    theirs = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert ours.json["tokens"] == json.loads(theirs.stdout)


def test_llama_cpp_continues_as_we_do(capsys: pytest.CaptureFixture[str]) -> None:
    """The same weights on both sides, and what each makes of them in a second; speeds are shown, not judged."""
    script = Path(__file__).parents[1] / "benchmarks" / "cpu_peers.py"
    made = subprocess.run(
        [sys.executable, str(script), "--rounds", "3", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
    )
    rows = {row["kind"]: row for row in json.loads(made.stdout)}
    with capsys.disabled():
        for kind, row in rows.items():
            prompt, decode = row["prompt_tokens_per_s"], row["decode_tokens_per_s"]
            print(f"\n{kind:>5}: prompt {prompt:.0f}, decode {decode:.1f} tokens/s", end="")
    assert rows["fp32"]["tokens"] == rows["F32"]["tokens"], "in fp32 both are exact, and random weights have few ties"
    assert all(len(row["tokens"]) == 64 for row in rows.values())


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed; run: make peers")
def test_gguf_files_continue_as_in_llama_cpp(tmp_path: Path) -> None:
    """Where tokens part, llama.cpp's two best logits are near. These of random weights have a deviation of 1.6, and
    llama.cpp rounds activations to 8 bits: 0.13 was the largest gap seen. K-quants are made by llama.cpp."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=128, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    script = Path(__file__).parents[1] / "benchmarks" / "gguf_peers.py"
    options = ["--prompts", "4", "--tokens", "16", "--formats", "F16,Q8_0,Q4_0,Q4_K,Q5_K,Q6_K", "--json"]
    command = [sys.executable, str(script), str(tmp_path / "m"), *options]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert made.stdout, made.stderr[-2000:]
    rows = json.loads(made.stdout)
    assert [row["format"] for row in rows] == ["F16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"]
    assert all(gap <= 0.25 for row in rows for gap in row["gaps"]), rows
    assert rows[0]["equal"] >= 2, rows

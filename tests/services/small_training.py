"""A model that trains in seconds, and the comparison of what two runs have learnt."""

from __future__ import annotations

from pathlib import Path

SLOW_STEPS = Path(__file__).parent / "slow_steps"
RECIPE = """
[model]
name = "armillary-2m"
num_layers = 2
hidden = 64
heads = 4
kv_heads = 2
head_dim = 16
ffn = 128
vocab = 512

[layout]
dp = 2
precision = "fp32"

[data]
source = "{text}"
vocab = 512

[train]
sequence = 64
batch_tokens = 512
steps = {steps}
save_every = 0
eval_every = 0
profile_every = 0
compile = false
deterministic = true
{more}
"""


def write_text(folder: Path) -> None:
    """Documents that are the same everywhere."""
    folder.mkdir(exist_ok=True)
    for number in range(40):
        lines = [f"line {number * line} of document {number}: {number * line % 97}" for line in range(100)]
        (folder / f"{number}.txt").write_text("\n".join(lines))


def same_weights(home: Path, *runs: str) -> bool:
    """Whether the exports of these runs are equal, byte by byte."""
    found = [sorted(home.glob(f"runs/*-{run}/export/*/model.safetensors")) for run in runs]
    assert all(len(files) == 1 for files in found), found
    return len({files[0].read_bytes() for files in found}) == 1

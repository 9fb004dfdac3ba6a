"""The commands as Python functions: look something up, train for a few seconds, generate, convert.

Run it with: python examples/python_api.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import armillary
from armillary.engine.request.sampling_params import Sampling
from armillary.spec.arithmetic.params import kv_bytes_per_token, parameters
from armillary.units import bytes_text, count_text

RECIPE = """
[model]
name = "armillary-2m"
vocab = 1024

[data]
source = "{source}"

[layout]
precision = "fp32"
micro_batch = 4

[train]
sequence = 64
batch_tokens = 512
steps = 15
"""


def look_up() -> None:
    config = armillary.models()["llama-3-8b"].config
    cluster = armillary.hardware("h100x64")
    print(f"{config.name}: {count_text(parameters(config).total)} parameters,", end=" ")
    print(f"{bytes_text(kv_bytes_per_token(config))} of KV cache per token")
    print(cluster.text())


def train_and_generate(folder: Path) -> None:
    home = armillary.Home.at(folder)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(source=Path(armillary.__file__).parent / "spec"))
    done = armillary.train(recipe, home=home, watch=lambda report: None)
    print(f"run {done.run.name}: loss {done.loss:.2f} after {done.steps} steps")
    for made in armillary.generate(done.export, ["def ", "class "], Sampling(max_tokens=16), home=home):
        print(repr(made.prompt + made.text))
    half = armillary.convert(done.run.name, folder / "half", dtype="bf16", home=home)
    print(f"converted to {half.name}: {bytes_text(sum(file.stat().st_size for file in half.glob('*.safetensors')))}")


if __name__ == "__main__":
    look_up()
    with tempfile.TemporaryDirectory() as name:
        train_and_generate(Path(name))

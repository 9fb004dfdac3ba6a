"""A program: saves a plain model folder with transformers in fp8 blocks, once per kind of scales.

    python write_transformers.py PLAIN OUT

OUT/NAME is the folder that transformers saved, OUT/NAME.safetensors its own dequantised weights [N, K], in bf16.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

VARIANTS = {"scales in fp32": "float", "scales are powers of two": "ue8m0"}


def main(plain: Path, out: Path) -> None:
    """Without a GPU transformers dequantises what it loads and quantizes it again as it saves, plain weights too; it
    then leaves the table out of config.json."""
    for name, scale_fmt in VARIANTS.items():
        table = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        source = Path(shutil.copytree(plain, out / f"{name}, plain"))
        add_table(source, table | {"scale_fmt": scale_fmt})
        load(source).save_pretrained(out / name)
        add_table(out / name, table | {"scale_fmt": scale_fmt})
        read_back(out, name)


def add_table(folder: Path, table: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": table}))


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def read_back(out: Path, name: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(out / name / "model.safetensors", "pt") as file:
        ends = ".weight_scale_inv"
        packed = [key.removesuffix("_scale_inv") for key in file.keys() if key.endswith(ends)]  # noqa: SIM118
    weights = load(out / name).state_dict()
    save_file({key: weights[key].contiguous() for key in packed}, out / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""A program: quantizes a plain model folder with gptqmodel, once per variant, and says what it reads from the files.

    python write_gptqmodel.py PLAIN OUT

OUT/NAME is the folder that gptqmodel saved, OUT/NAME.safetensors its own dequantised weights [N, K] and, as `logits`,
what its own forward makes of `tokens`.
"""

import os
import sys
from pathlib import Path
from typing import Any

_EXCEPTIONS = {
    "-:model\\.layers\\.1\\.self_attn\\.q_proj": {},
    "+:.*\\.down_proj": {"bits": 8, "group_size": 64},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gptq act-order": {"bits": 4, "group_size": 32, "desc_act": True},
    "gptq with zeros": {"bits": 4, "group_size": 128, "desc_act": False, "sym": False},
    "gptq_v2 with zeros, act-order": {
        "bits": 4, "group_size": 32, "desc_act": True, "sym": False, "format": "gptq_v2"
    },
    "gptq 8 bits, act-order": {"bits": 8, "group_size": 128, "desc_act": True},
    "gptq with its head": {"bits": 4, "group_size": 32, "desc_act": True, "lm_head": True},
    "gptq dynamic": {"bits": 4, "group_size": 32, "desc_act": False, "dynamic": _EXCEPTIONS},
    "fp8 blocks": {
        "method": "fp8", "format": "fp8", "bits": 8, "weight_scale_method": "block", "weight_block_size": [128, 128]
    },
}  # fmt: skip


def main(plain: str, out: Path) -> None:
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # its default on two cores is one, which it then refuses
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    numbers = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 96, (64,), generator=numbers).tolist() for _ in range(16)]
    for name, options in VARIANTS.items():
        model = GPTQModel.load(plain, QuantizeConfig(**options), device="cpu")
        model.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts], batch_size=1)
        model.save(str(out / name))
        read_back(out, name)


def read_back(out: Path, name: str) -> None:
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from safetensors.torch import save_file

    is_fp8 = name.startswith("fp8")
    options = {"dtype": torch.float32} if is_fp8 else {"dtype": torch.float16, "backend": BACKEND.GPTQ_TORCH}
    model = GPTQModel.load(str(out / name), device="cpu", **options).model
    layers = [(each, layer) for each, layer in model.named_modules() if hasattr(layer, "dequantize_weight")]
    found = {f"{each}.weight": layer.dequantize_weight().detach().t().contiguous() for each, layer in layers}
    tokens = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits.float()
    save_file(found | {"tokens": tokens, "logits": logits}, out / f"{name}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

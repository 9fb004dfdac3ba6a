"""A program: packs a plain model folder with AutoAWQ's own layer, once per variant, and says what AutoAWQ reads.

    python write_autoawq.py PLAIN OUT

OUT/NAME is the folder, OUT/NAME.safetensors its dequantised weights [N, K] by AutoAWQ. Rounded to nearest: AutoAWQ's
search for scales was last made for transformers 4.51, its layer is what defines the format.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

VARIANTS = {"groups of 32": 32, "groups of 128": 128}


def main(plain: str, out: Path) -> None:
    import torch
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    for name, group in VARIANTS.items():
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float16)
        settings = SimpleNamespace(w_bit=4, group_size=group, zero_point=True)
        theirs = {}
        for module, linear in list(model.model.named_modules()):
            if isinstance(linear, torch.nn.Linear):
                weight, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(settings, linear.weight.data)
                linear.weight.data = weight
                packed = packed_layer(linear, group, scales.t().contiguous(), zeros.t().contiguous())
                model.model.set_submodule(module, packed)
                read = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, group)
                theirs[f"model.{module}.weight"] = read.t().contiguous()
        table = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        model.config.quantization_config = table | {"modules_to_not_convert": None}
        model.save_pretrained(out / name)
        save_file(theirs, out / f"{name}.safetensors")


def packed_layer(linear, group, scales, zeros):  # type: ignore[no-untyped-def]
    from awq.modules.linear.gemm import WQLinear_GEMM

    return WQLinear_GEMM.from_linear(linear, w_bit=4, group_size=group, scales=scales, zeros=zeros)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

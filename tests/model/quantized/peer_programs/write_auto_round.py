"""A program: quantizes a plain model folder with auto-round, once per variant, and says what it reads from the files.

    python write_auto_round.py PLAIN OUT

OUT/NAME is the folder that auto-round saved, OUT/NAME.safetensors its own dequantised weights [N, K].
"""

import shutil
import sys
from pathlib import Path
from typing import Any

_MIXED = {"model.layers.0.mlp.down_proj": {"bits": 8}, "model.layers.1.self_attn.q_proj": {"bits": 16}}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq groups of 32": ("auto_gptq", "W4A16", {"group_size": 32}),
    "gptq groups of 128 with zeros": ("auto_gptq", "W4A16", {"sym": False}),
    "gptq per row": ("auto_gptq", "W4A16", {"group_size": -1}),
    "gptq 8 bits": ("auto_gptq", "W8A16", {"group_size": 32}),
    "gptq mixed": ("auto_gptq", "W4A16", {"layer_config": _MIXED}),
    "awq groups of 32 with zeros": ("auto_awq", "W4A16", {"group_size": 32, "sym": False}),
    "awq groups of 128": ("auto_awq", "W4A16", {}),
    "auto-round gptq": ("auto_round", "W4A16", {"group_size": 32}),
    "auto-round gptq with zeros": ("auto_round:auto_gptq", "W4A16", {"sym": False}),
    "auto-round gptq mixed": ("auto_round", "W4A16", {"layer_config": _MIXED}),
    "auto-round awq": ("auto_round", "W4A16", {"group_size": 32, "sym": False}),
    "auto-round mxfp4": ("auto_round", "MXFP4", {}),
    "auto-round fp8 blocks": ("auto_round:fp8", "FP8_BLOCK", {}),
    "fp8 blocks": ("fp8", "FP8_BLOCK", {}),
}
"""name -> export format, scheme, and what differs from the scheme"""


def main(plain: str, out: Path) -> None:
    from auto_round import AutoRound
    from safetensors.torch import load_file, save_file

    for name, (format, scheme, options) in VARIANTS.items():
        options = {"iters": 0, "disable_opt_rtn": True, "disable_model_free": True, "device_map": "cpu"} | options
        AutoRound(plain, scheme=scheme, **options).quantize_and_save(str(out / "saved"), format=format)
        (saved,) = (out / "saved").iterdir()
        shutil.move(saved, out / name)
        save_file(dequantised(load_file(out / name / "model.safetensors")), out / f"{name}.safetensors")


def dequantised(stored: dict[str, Any]) -> dict[str, Any]:
    ends = (".qweight", ".weight_scale_inv", ".weight_packed")
    modules = sorted({name.rpartition(".")[0] for name in stored if name.endswith(ends)})
    parts = {
        module: {
            name.rpartition(".")[2]: tensor for name, tensor in stored.items() if name.rpartition(".")[0] == module
        }
        for module in modules
    }
    return {f"{module}.weight": _weight(part).contiguous() for module, part in parts.items()}


def _weight(part: dict[str, Any]) -> Any:
    import torch

    if "weight_scale_inv" in part:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        codes, scales = part["weight"], part["weight_scale_inv"].float()
        return Fp8Dequantize(None).convert({"weight": [codes], "weight_scale_inv": [scales]})["weight"]
    if "weight_packed" in part:
        from auto_round.experimental.qmodules.fp4_utils import unpack_fp4_from_uint8
        from auto_round.experimental.qmodules.mx import get_fp_scale

        rows, columns = part["weight_packed"].shape[0], 2 * part["weight_packed"].shape[1]
        codes = unpack_fp4_from_uint8(part["weight_packed"], rows, columns, dtype=torch.float32)
        return (codes.unflatten(1, (-1, 32)) * get_fp_scale(part["weight_scale"])[..., None]).flatten(1)
    groups, rows = part["scales"].shape
    if part["qweight"].shape[1] == rows:
        return _gptq_weight(part, groups, rows)
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    columns = part["qweight"].shape[0]
    return dequantize_gemm(part["qweight"], part["qzeros"], part["scales"], 4, columns // groups).t()


def _gptq_weight(part: dict[str, Any], groups: int, rows: int) -> Any:
    """What auto-round's layer makes of the unit matrix. Without g_idx, which is in order: with one, the layer takes
    no more outputs than inputs."""
    import torch
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    bits = part["qzeros"].shape[1] * 32 // rows
    columns = part["qweight"].shape[0] * 32 // bits
    layer = QuantLinear(bits, columns // groups, columns, rows, bias=False)
    layer.load_state_dict({name: tensor for name, tensor in part.items() if name not in ("bias", "g_idx")})
    return layer(torch.eye(columns)).half().t()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

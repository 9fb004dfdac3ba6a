"""LoRA training: adapters on a frozen model, merged into it on export or written as a folder that `peft` loads.

Everything that is written works on full tensors by name, so it does not depend on the layout.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from armillary.model.lora import NAMES, attach, draw, expand_b
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_layout import Rule, rules
from armillary.model.weights.safetensors_writer import write_tensors
from armillary.spec.lora import Target, targets
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob
from armillary.store.atomic import staged_folder

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def base_dtype(job: TrainJob, precision: str) -> torch.dtype:
    """Of the weights as they are loaded: frozen ones in the format they are multiplied in, trained ones in fp32."""
    return HALF.get(precision, torch.float32) if job.lora_rank else torch.float32


def add_lora(model: Transformer, job: TrainJob, *, precision: str = "fp32") -> None:
    """Freeze the model, in the format it is multiplied in, and put fp32 adapters on it; does nothing at rank 0. Call it
    before the model is sharded."""
    if not job.lora_rank:
        return
    if precision in HALF:
        model.to(HALF[precision])
    present = {name for name, _ in model.named_modules()}  # a pipeline stage has some
    wanted = {name: target for name, target in targets(model.config, job.lora_on).items() if name in present}
    attach(model, wanted, rank=job.lora_rank, scale=job.lora_scale, dropout=job.lora_dropout)
    if not next(model.parameters()).is_meta:
        draw(model, seed=job.seed)


# --- a peft folder


def save_adapter(
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    job: TrainJob,
    folder: Path,
    *,
    base: str,
    overwrite: bool = False,
) -> Path:
    """Write `adapter_config.json` and `adapter_model.safetensors` with Hugging Face's names; `base` is the model they
    belong to."""
    adapter = peft_tensors(tensors, config, job)
    with staged_folder(folder, overwrite=overwrite) as staged:
        write_tensors(staged / "adapter_model.safetensors", adapter)
        text = json.dumps(peft_config(adapter, config, job, base=base), indent=2)
        (staged / "adapter_config.json").write_text(text + "\n")
    return folder


def peft_tensors(tensors: Mapping[str, Tensor], config: ModelConfig, job: TrainJob) -> dict[str, Tensor]:
    """lora_A and lora_B of every projection that a Hugging Face model has."""
    by_name = {rule.name: rule for rule in rules(config)}
    renamed: dict[str, Tensor] = {}
    for module, target in targets(config, job.lora_on).items():
        a, b = (tensors[f"{module}.{name}"].detach().to("cpu", torch.float32) for name in NAMES)
        for name, (own_a, own_b) in _unfused(by_name[f"{module}.weight"], target, a, b, job.lora_rank).items():
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            renamed[f"{prefix}.lora_A.weight"], renamed[f"{prefix}.lora_B.weight"] = own_a, own_b
    return renamed


def _unfused(rule: Rule, target: Target, a: Tensor, b: Tensor, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Hugging Face's name -> its own A and B."""
    outputs = rule.split(expand_b(b, target))
    if target.one_a:
        return {rule.hf_names[0]: (a.contiguous(), outputs[0].contiguous())}
    parts, number = {}, 0
    for name, output, on in zip(rule.hf_names, outputs, target.chosen, strict=True):
        if on:
            own = slice(number * rank, (number + 1) * rank)
            parts[name] = (a[own].contiguous(), output[:, own].contiguous())
            number += 1
    return parts


def peft_config(adapter: Mapping[str, Tensor], config: ModelConfig, job: TrainJob, *, base: str) -> dict[str, object]:
    """What peft reads; modules by their last name, or in full where experts have modules of the same names."""
    modules = sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapter})
    short = sorted({name.rpartition(".")[2] for name in modules})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": job.lora_rank,
        "lora_alpha": job.lora_scale * job.lora_rank,
        "lora_dropout": job.lora_dropout,
        "target_modules": modules if config.moe is not None else short,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }

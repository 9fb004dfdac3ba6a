"""The kernels of a run: chosen once when the model is built, set on its layers, and named for ranks and resumed runs.

On a CPU, and for what no kernel covers, layers keep their plain form. Nothing is chosen or timed inside a step.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.choose_version import choose, revision
from armillary.kernels.core.op import find_op
from armillary.kernels.core.requirements import interpreted, lacking
from armillary.kernels.core.torch_compat import free_gemm_workspaces
from armillary.kernels.fp8.linear import FP8_LINEAR
from armillary.kernels.gemm.autotune import LinearShape, tune, tune_sums
from armillary.kernels.gemm.gemm import TORCH, Gemms, TunedGemms
from armillary.kernels.gemm.grouped import grouped_linear
from armillary.machine.device_name import device_name
from armillary.model.fused.dispatch import fits
from armillary.model.fused.passes import FusedOptions
from armillary.model.layers.attention import Attention
from armillary.model.layers.attention_forms import Attend, AttentionFunction, Sight, chosen
from armillary.model.layers.mlp import MLP
from armillary.model.layers.norm import Norm
from armillary.model.layers.simplicial_attention import SimplicialAttention
from armillary.model.low_precision.fp8 import Fp8Gemms, Fp8Weights, use_fp8
from armillary.model.low_precision.weights_16bit import Weights16Bit
from armillary.model.moe.experts import Experts, MixtureOfExperts
from armillary.model.moe.sorted_dispatch import SortedDispatch
from armillary.model.transformer import Block, Transformer
from armillary.spec.arithmetic.mfu import model_flops_per_token
from armillary.spec.fp8 import stays_in_bf16
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.store.kernel_choices import load_choice, save_choice
from armillary.training.setup.kernel_cases import Wanted, attention_name, wanted
from armillary.training.step.loss import LossSum, loss_sum, through
from armillary.training.step.optimizer_offload import matrices

_SLOW_TO_BUILD = ("compile", "flex")
"""versions that torch's compiler would have to build, for tens of seconds a run"""
BLOCK, FUSED = "block", "fused"
"""the name of the choice for blocks, and its value where blocks run as fused passes"""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a run computes with: `names` maps each function to the version selected for it, from which `use_kernels`
    selects the same again; `attention` is by (window, whether rows hold several documents); `weights_16bit` are the
    copies for GEMMs."""

    names: dict[str, str] = field(default_factory=dict)
    attention: dict[tuple[Sight, bool], AttentionFunction] = field(default_factory=dict)
    loss: LossSum = loss_sum
    weights_16bit: Weights16Bit | None = None

    @property
    def copies(self) -> Mapping[Tensor, Tensor]:
        """For `kernels.adamw.AdamW`, which keeps them equal to the parameters."""
        return {} if self.weights_16bit is None else self.weights_16bit.copies

    def attend(self, documents_BT: Tensor | None) -> Attend:
        """What a step hands to the model; None where every row is one document."""
        return chosen(self.attention, documents_BT)


def use_kernels(
    model: Transformer,
    *,
    job: TrainJob,
    layout: Layout,
    home: Home | None = None,
    names: Mapping[str, str] | None = None,
    timed: bool = True,
    device: torch.device | None = None,
) -> Choices:
    """Choose for the model's shapes (or take what `names` says) and set the functions on its layers.

    Called after adapters are added and before the model is sharded, on rank 0 with `names` None, on the others
    with rank 0's choices. Deterministic jobs, and `timed` False, take the first version that agrees without timing.
    `device` is where the model will be, while it is still on meta.
    """
    device = device or next(model.parameters()).device
    _sort_experts(model, job, grouped_linear)
    if layout.precision == "fp8":
        use_fp8(model, scaling=layout.fp8_scaling, exclude=stays_in_bf16(model.config, layout), multiply=_fp8(device))
    if device.type != "cuda" and not (names and interpreted()):
        return Choices()
    functions, taken = {}, {}
    for want in wanted(model.config, job, layout, device=device):
        taken[want.name], functions[want.name] = _choose(want, names or {}, home, timed and not job.deterministic)
    taken[BLOCK] = _block_form(job, layout, taken, device)
    if taken[BLOCK] == FUSED:  # what was chosen earlier may say no, but not that a layout can what it cannot
        taken[BLOCK] = (names or {}).get(BLOCK, FUSED)
    _set_layers(model, functions)
    weights_16bit = Weights16Bit(torch.bfloat16) if layout.precision in ("bf16", "fp8") else None
    _sort_experts(model, job, functions.get("grouped_linear", grouped_linear), weights_16bit)
    if taken[BLOCK] == FUSED:
        used = any(fits(block) for block in model.blocks.values())  # not with adapters, for one
        how: dict[str, Any] = {"names": names, "home": home, "timed": timed and used and not job.deterministic}
        gemms, gemm_names = choose_gemms(model.config, job, layout, device, **how)
        norm_pairs = taken.get("norm") == "triton, pairs"
        _fuse(model, job, layout, weights_16bit=weights_16bit, gemms=gemms, norm_pairs=norm_pairs)
        taken |= gemm_names
    if weights_16bit is not None:
        model.residual_dtype = weights_16bit.dtype
    _free_memory(device)
    return Choices(
        names=taken,
        attention=_attention(model, functions),
        weights_16bit=weights_16bit,
        loss=through(functions["linear_cross_entropy"], weights_16bit)
        if "linear_cross_entropy" in functions
        else loss_sum,
    )


def _fp8(device: torch.device) -> Callable[..., Tensor]:
    """fp8 layers outside fused blocks: the library's GEMMs where available, else the emulation."""
    version = FP8_LINEAR.version("triton+cublas")
    assert version is not None
    return FP8_LINEAR.reference if lacking(version.needs, device.type) else version.load()


def _free_memory(device: torch.device) -> None:
    """The memory of timed candidates is no part of the run, nor of its peak."""
    if device.type == "cuda":
        gc.collect()  # a candidate that failed may be held by its error
        free_gemm_workspaces()  # candidates ran on streams of their own
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _choose(want: Wanted, names: Mapping[str, str], home: Home | None, timed: bool) -> tuple[str, Callable[..., Any]]:
    op = find_op(want.op)
    version = op.version(names[want.name]) if want.name in names else None
    if version is not None and (interpreted() or not lacking(version.needs, want.case.device)):
        return version.name, version.load()
    quick = replace(op, versions=tuple(v for v in op.versions if v.name not in _SLOW_TO_BUILD))
    choice = choose(quick, want.case, home=home, deterministic=not timed)
    return choice.version, choice.run


def _block_form(job: TrainJob, layout: Layout, taken: Mapping[str, str], device: torch.device) -> str:
    """Fused where their kernels are ours, unless blocks are compiled; fp16 keeps a wide residual stream instead, and
    fp8 needs units of its own."""
    ours = all(taken[name].startswith("triton") for name in ("norm", "rope", "activate") if name in taken)
    fits_unit = layout.precision != "fp8" or not lacking(("sm_90",), device.type)
    return FUSED if ours and fits_unit and not job.compiled and layout.precision != "fp16" else "layers"


def _set_layers(model: Transformer, functions: Mapping[str, Callable[..., Any]]) -> None:
    attentions = (layer for layer in model.modules() if isinstance(layer, Attention | SimplicialAttention))
    heads = {norm for layer in attentions for norm in (layer.q_norm, layer.k_norm)}
    for layer in model.modules():
        if isinstance(layer, Norm):
            layer.chosen = functions.get("head_norm" if layer in heads else "norm")
            layer.chosen_add = None if layer in heads else functions.get("add_norm")
        elif isinstance(layer, Attention):
            layer.chosen = functions.get("rope")
        elif isinstance(layer, MLP | Experts):
            layer.chosen = functions.get("activate")


def _sort_experts(
    model: Transformer, job: TrainJob, grouped: Callable[..., Tensor], weights_16bit: Weights16Bit | None = None
) -> None:
    """Experts take sorted tokens, in one grouped GEMM, and the 16-bit copies of their weights where there are some."""
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.dispatch = SortedDispatch(grouped, drops=job.expert_capacity is not None)
            layer.experts.weights_16bit = weights_16bit


def _fuse(model: Transformer, job: TrainJob, layout: Layout, *, weights_16bit: Weights16Bit | None, **how: Any) -> None:
    """Blocks as two passes; on one device gradients are summed where they are made, or have the dtype of their GEMM,
    which is exact, where there is one micro-batch and so nothing to sum."""
    alone = layout.num_devices == 1
    micro_batches = layout.num_micro_batches(job.batch_tokens, job.sequence)
    scaling = layout.fp8_scaling
    fp8 = Fp8Gemms(scaling=scaling, weights=Fp8Weights(scaling)) if layout.precision == "fp8" else None
    fused = FusedOptions(weights_16bit=weights_16bit, accumulate=alone and micro_batches > 1, fp8=fp8, **how)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.fused = fused
    if alone and micro_batches == 1 and weights_16bit is not None:
        for weight in matrices(model):
            if weight.requires_grad and hasattr(weight, "grad_dtype"):
                weight.grad_dtype = weights_16bit.dtype


def _attention(
    model: Transformer, functions: Mapping[str, Callable[..., Any]]
) -> dict[tuple[Sight, bool], AttentionFunction]:
    windows: list[Sight] = [layer.window for layer in model.modules() if isinstance(layer, Attention)]
    windows += [layer.windows for layer in model.modules() if isinstance(layer, SimplicialAttention)]
    names = {
        (window, packed): attention_name(window, documents=packed) for window in windows for packed in (False, True)
    }
    return {key: functions[name] for key, name in names.items() if name in functions}


_WORTH_S, _FLOPS_PER_S = 200.0, 5e14
"""how long a run must be expected to take, on a chip of that speed, for its GEMMs to be timed"""


def choose_gemms(
    config: ModelConfig,
    job: TrainJob,
    layout: Layout,
    device: torch.device,
    *,
    names: Mapping[str, str] | None,
    home: Home | None,
    timed: bool,
) -> tuple[Gemms, dict[str, str]]:
    """The GEMMs of fused blocks, timed once per device and shapes and cached, and their names in the choices;
    `names` are earlier choices. Timing takes some seconds on a hot chip, so only long runs do it."""
    known = {key: name for key, name in (names or {}).items() if key.startswith("product ")}
    wanted = timed and not names and device.type == "cuda" and layout.precision == "bf16"
    flops = model_flops_per_token(config, job.sequence) * job.total_tokens / layout.num_devices
    if wanted and flops / _FLOPS_PER_S > _WORTH_S:
        summed = job.batch_tokens > job.sequence * layout.micro_batch * layout.dp and layout.num_devices == 1
        known = _timed(layers(config), layout.micro_batch * job.sequence, device, home, summed=summed)
    return (TunedGemms(known) if any(name != TORCH for name in known.values()) else Gemms()), known


def layers(config: ModelConfig) -> list[LinearShape]:
    """Of a block: QKV, attention's output, a dense MLP's two."""
    heads = config.heads * config.head_dim
    inner = config.ffn * (2 if config.gated else 1)
    qkv = heads + 2 * config.kv_heads * config.head_dim
    attention = [LinearShape(qkv, config.hidden), LinearShape(config.hidden, heads, added=True)]
    if config.num_moe_layers == config.num_layers:
        return attention
    return [*attention, LinearShape(inner, config.hidden), LinearShape(config.hidden, config.ffn, added=True)]


def _timed(
    wanted: list[LinearShape], tokens: int, device: torch.device, home: Home | None, *, summed: bool
) -> dict[str, str]:
    """Gradients that are summed are timed apart, so that runs with and without accumulation share the rest."""
    shapes = f"{tokens} {[tuple(layer) for layer in wanted]} bf16 {revision()}"
    how = (wanted, tokens, torch.bfloat16, device)
    names = _remembered(home, device, f"products {shapes}", lambda: tune(*how))
    if not summed:
        return names
    return names | _remembered(home, device, f"summed products {shapes}", lambda: tune_sums(*how, names))


def _remembered(
    home: Home | None, device: torch.device, key: str, make: Callable[[], dict[str, str]]
) -> dict[str, str]:
    name = device_name(device.type, threads=torch.get_num_threads())
    known = load_choice(home, name, key) if home is not None else None
    if known is None:
        known = make()
        if home is not None:
            save_choice(home, name, key, known)
    return {str(shape): str(chosen) for shape, chosen in known.items()}

"""Selects the GEMMs of a run's fused blocks: timed once per device and shapes, then cached.

Timing takes some seconds on a hot chip, so it is done for runs that last and only where nothing says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from armillary.kernels.core.cache_key import device_name, revision
from armillary.kernels.gemm.autotune import LinearShape, tune, tune_sums
from armillary.kernels.gemm.gemm import TORCH, Gemms, TunedGemms
from armillary.spec.arithmetic.mfu import model_flops_per_token
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.store.kernel_choices import load_choice, save_choice

_WORTH_S, _FLOPS_PER_S = 200.0, 5e14
"""how long a run must be expected to take, on a chip of that speed, for its GEMMs to be timed"""


def choose_products(
    config: ModelConfig,
    job: TrainJob,
    layout: Layout,
    device: torch.device,
    *,
    names: Mapping[str, str] | None,
    home: Home | None,
    timed: bool,
) -> tuple[Gemms, dict[str, str]]:
    """The GEMMs, and their names in the run's choices; `names` are earlier choices."""
    known = {key: name for key, name in (names or {}).items() if key.startswith("product ")}
    wanted = timed and not names and device.type == "cuda" and layout.precision == "bf16"
    if wanted and _is_worth_it(config, job, layout):
        summed = job.batch_tokens > job.sequence * layout.micro_batch * layout.dp and layout.num_devices == 1
        known = _timed(layers(config), layout.micro_batch * job.sequence, device, home, summed=summed)
    useful = any(name != TORCH for name in known.values())
    return (TunedGemms(known) if useful else Gemms()), known


def layers(config: ModelConfig) -> list[LinearShape]:
    """Of a block: QKV, attention's output, a dense MLP's two."""
    heads = config.heads * config.head_dim
    inner = config.ffn * (2 if config.gated else 1)
    qkv = heads + 2 * config.kv_heads * config.head_dim
    attention = [LinearShape(qkv, config.hidden), LinearShape(config.hidden, heads, added=True)]
    if config.num_moe_layers == config.num_layers:
        return attention
    return [*attention, LinearShape(inner, config.hidden), LinearShape(config.hidden, config.ffn, added=True)]


def _is_worth_it(config: ModelConfig, job: TrainJob, layout: Layout) -> bool:
    flops = model_flops_per_token(config, job.sequence) * job.total_tokens / layout.num_devices
    return flops / _FLOPS_PER_S > _WORTH_S


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
    name = device_name(device.type)
    known = load_choice(home, name, key) if home is not None else None
    if known is None:
        known = make()
        if home is not None:
            save_choice(home, name, key, known)
    return {str(shape): str(chosen) for shape, chosen in known.items()}

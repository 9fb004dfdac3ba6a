"""A model folder opened one block at a time, and what the calibration text puts into the layers of a block.

Memory is one block in fp32 and the hidden states of the text: a model need not fit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.model.layers.attention_forms import Attend, plain
from armillary.model.moe.experts import Experts, MixtureOfExperts
from armillary.model.quantizing.awq import InputStatistics, Statistics, weight_of
from armillary.model.transformer import Block, Transformer
from armillary.model.weights.hf_weights import check_head, fill
from armillary.model.weights.safetensors_folder import TensorFolder
from armillary.spec.model import ModelConfig

# W windows, T tokens, H hidden, K inputs of a layer
_WINDOWS = 4  # run together
See = Callable[[str, Tensor], Tensor]
"""(parameter, inputs of its layer) -> the inputs that are used"""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The parts of a model as pipeline stages, each built and filled when it is asked for, in fp32."""

    config: ModelConfig
    stored: TensorFolder
    device: torch.device

    def check(self) -> None:
        """BadModel where the folder is not this model's."""
        check_head(self.config, self.stored)

    def embedding(self) -> Transformer:
        return self._stage(range(0), first=True)

    def block(self, layer: int) -> Transformer:
        return self._stage(range(layer, layer + 1))

    def head(self) -> Transformer:
        """The last norm and the output, which may be the embedding."""
        return self._stage(range(0), last=True)

    def _stage(self, layers: range, *, first: bool = False, last: bool = False) -> Transformer:
        with torch.device("meta"):
            stage = Transformer(self.config, layers=layers, first=first, last=last)
        stage = stage.to(torch.float32).to_empty(device=self.device)
        for module in stage.modules():
            if isinstance(module, MixtureOfExperts):
                module.router.reset()
        if any(True for _ in stage.parameters()):
            fill(stage, self.stored)
        return stage.requires_grad_(False)


@torch.no_grad()
def run_stage(stage: Transformer, x: Tensor, attend: Attend = plain) -> Tensor:
    """All windows through a stage: [W, T] or [W, T, H] -> [W, T, H], kept on the CPU."""
    device = next(stage.parameters()).device
    positions_BT = torch.arange(x.shape[1], device=device)[None]
    parts = []
    for part in x.split(_WINDOWS):
        parts.append(stage(part.to(device), positions_BT.expand(len(part), -1), attend).cpu())
    return torch.cat(parts)


@contextmanager
def watched(block: Block, see: See) -> Iterator[None]:
    """Every input of a linear layer or an expert goes through `see`; parameters are named as in the block, an expert's
    number behind a #."""
    linears = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(_hook(f"{name}.weight", see)) for name, module in linears]
    experts = block.mlp.experts if isinstance(block.mlp, MixtureOfExperts) else None
    if experts is not None:
        experts.single = _watched_single(experts, see)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if experts is not None:
            del experts.single


def _hook(name: str, see: See) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    return lambda module, inputs: (see(name, inputs[0]),)


def _watched_single(experts: Experts, see: See) -> Callable[[Tensor, int], Tensor]:
    """`Experts.single` with its inputs shown."""

    def single(x_MH: Tensor, expert: int) -> Tensor:
        up_bias = None if experts.up_bias_E2F is None else experts.up_bias_E2F[expert]
        down_bias = None if experts.down_bias_EH is None else experts.down_bias_EH[expert]
        x_MH = see(f"mlp.experts.up_E2FH#{expert}", x_MH)
        inner = experts.activate(F.linear(x_MH, experts.up_E2FH[expert], up_bias))
        inner = see(f"mlp.experts.down_EHF#{expert}", inner)
        return F.linear(inner, experts.down_EHF[expert], down_bias)

    return single


def input_statistics(stage: Transformer, block: Block, x_WTH: Tensor, wanted: set[str]) -> Statistics:
    """Of the layers `wanted`, over all windows; zeros for an expert that no token comes to."""
    columns = {name: weight_of(block, name)[0] for name in wanted}
    grams = {name: torch.zeros(len(row), len(row), device=row.device) for name, row in columns.items()}
    sizes = {name: torch.zeros(len(row), device=row.device) for name, row in columns.items()}

    def see(name: str, x: Tensor) -> Tensor:
        if name in wanted:
            rows = x.flatten(0, -2)
            grams[name].addmm_(rows.T, rows)
            sizes[name] += rows.abs().sum(0)
        return x

    with watched(block, see):
        run_stage(stage, x_WTH)
    return {name: InputStatistics(gram_KK=gram, size_K=sizes[name]) for name, gram in grams.items()}

"""LoRA: a frozen projection with trained adapters: y = W·x + scale·B·A·x.

Projections that are fused into one matrix here keep their own A and B, so that adapters are those of a Hugging Face
model; B's rows are in the fused order, so a contiguous shard of the outputs holds whole heads and gate-up pairs.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.model.quantized.packed_linear import PackedLinear
from armillary.model.random_values import PartOf, all_of, fill_uniform
from armillary.model.transformer import Transformer
from armillary.spec.lora import Target

# r rank, A matrices A of a module, I inputs, O outputs, P rows of B: those of the outputs that are adapted
NAMES = ("lora_a", "lora_b")


class _Adapted(nn.Module):
    """Adapters `lora_a` and `lora_b` of a frozen projection."""

    def _add_adapters(self, target: Target, device: torch.device, rank: int, scale: float, dropout: float) -> None:
        self.target, self.rank, self.scale, self.dropout = target, rank, scale, dropout
        self.lora_a = nn.Parameter(torch.empty(target.num_a * rank, target.inputs, device=device))
        self.lora_b = nn.Parameter(torch.empty(target.periods * target.adapted, rank, device=device))

    def _adapted(self, x: Tensor, base: Tensor) -> Tensor:
        """With `base`, the output of the frozen projection."""
        dropped = F.dropout(x, self.dropout, training=self.training) if self.dropout else x
        inner = F.linear(dropped, self.lora_a.to(x.dtype))
        b_OA = expand_b(self.lora_b, self.target) * self.scale
        # one GEMM: the output of B is never held beside the base and their sum, the memory peak of a recomputed layer
        return torch.addmm(base.flatten(0, -2), inner.flatten(0, -2), b_OA.to(base.dtype).t()).view(base.shape)


class PackedLoraLinear(PackedLinear, _Adapted):
    """Adapters on a projection whose weight stays packed (QLoRA, Dettmers et al. 2023, arXiv 2305.14314)."""

    def __init__(self, base: PackedLinear, target: Target, *, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__(base.weight)
        self.bias = base.bias
        device = next(iter(base.weight.parts[0].rows.values())).device
        self._add_adapters(target, device, rank, scale, dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self._adapted(x, super().forward(x))


class LoraLinear(nn.Linear, _Adapted):
    """A Linear whose weight and bias are frozen and keep their names, with adapters `lora_a` and `lora_b`."""

    def __init__(self, base: nn.Linear, target: Target, *, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self._add_adapters(target, base.weight.device, rank, scale, dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self._adapted(x, F.linear(x, self.weight, self.bias))

    def merged_weight(self) -> Tensor:
        """[O, I]: the weight with its adapters added, in its own dtype."""
        added = change(self.lora_a, self.lora_b, self.target, scale=self.scale)
        return (self.weight.to(added.dtype) + added).to(self.weight.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, on={self.target.chosen}"


def expand_b(b_Pr: Tensor, target: Target) -> Tensor:
    """B as [O, A·r]: each row in the columns of its own A, zero in the other columns and where a row is not adapted.
    Works on a part of the rows, as long as it holds whole periods."""
    if target.one_a and all(target.chosen):
        return b_Pr
    rank, widths = b_Pr.shape[1], [w for w, on in zip(target.widths, target.chosen, strict=True) if on]
    pieces = iter(b_Pr.unflatten(0, (-1, target.adapted)).split(widths, dim=1))
    placed, number = [], 0
    for width, on in zip(target.widths, target.chosen, strict=True):
        piece = next(pieces) if on else b_Pr.new_zeros(len(b_Pr) // target.adapted, width, rank)
        left = 0 if target.one_a else min(number, target.num_a - 1) * rank
        placed.append(F.pad(piece, (left, target.num_a * rank - left - rank)))
        number += on
    return torch.cat(placed, dim=1).flatten(0, 1)


def change(a_AI: Tensor, b_Pr: Tensor, target: Target, *, scale: float) -> Tensor:
    """The change of the matrix, [O, I]."""
    return scale * expand_b(b_Pr, target) @ a_AI


def adapters(model: nn.Module) -> Iterator[tuple[str, LoraLinear | PackedLoraLinear]]:
    """Every projection with adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear | PackedLoraLinear):
            yield name, module


def attach(model: Transformer, wanted: dict[str, Target], *, rank: int, scale: float, dropout: float = 0.0) -> None:
    """Freeze the model and put uninitialised adapters on the named modules."""
    model.requires_grad_(False)
    for name, target in wanted.items():
        parent, _, last = name.rpartition(".")
        base = model.get_submodule(name)
        options = {"rank": rank, "scale": scale, "dropout": dropout}
        assert isinstance(base, nn.Linear | PackedLinear), name
        adapted = (
            PackedLoraLinear(base, target, **options)  # type: ignore[arg-type]
            if isinstance(base, PackedLinear)
            else LoraLinear(base, target, **options)  # type: ignore[arg-type]
        )
        setattr(model.get_submodule(parent), last, adapted)


@torch.no_grad()
def draw(model: nn.Module, *, seed: int, part_of: PartOf = all_of) -> None:
    """Initialise adapters: A uniform within 1/√inputs (as in peft), the same in every layout; B zero, so that the model
    starts unchanged. `part_of` gives this process's part of a sharded parameter."""
    for name, module in adapters(model):
        a, b = (module._parameters[each] for each in NAMES)  # as registered, not what a sharded class shows
        assert a is not None and b is not None
        fill_uniform(part_of(a), seed=seed, name=f"{name}.lora_a", bound=module.target.inputs**-0.5)
        b.zero_()

"""One token of one sequence through a whole dense model, from its id to logits, over a paged cache.

For the usual model alone: RMS norms before, SwiGLU, rotary positions over whole heads, optionally a norm of queries and
keys a head, no biases. `WholeStep` holds addresses of its weights and the buffers in between; the launch depends on no
lengths, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.launch import ceil_div, num_programs, on, power_of_two

# H hidden, Q all query heads' dims, F inner width, V vocabulary, D head dim


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLayer:
    """Weights of a layer, all contiguous and of one dtype."""

    qkv: Tensor
    """[KV heads · (queries of one + 2) · D, H], a KV head's rows together: queries, key, value"""
    out: Tensor
    """[H, Q]"""
    up: Tensor
    """[2F, H], gate and up alternating"""
    down: Tensor
    """[H, F]"""
    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None = None
    """[D]; none: queries and keys are not normed"""
    k_norm: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StepModel:
    """What a step needs of a model."""

    layers: Sequence[StepLayer]
    embedding: Tensor
    """[V, H]"""
    norm: Tensor
    """[H], the last"""
    output: Tensor
    """[V, H]"""
    cos: Tensor
    """[positions, D/2], fp32"""
    sin: Tensor
    heads: int
    """of queries"""
    scale: float
    """of attention's scores"""
    eps: float = 1e-6
    """of the norms"""
    qk_eps: float = 1e-6
    """of those of queries and keys"""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the work is cut; what is quick on an H200 unless said otherwise."""

    warps: int = 8
    """of a program"""
    a_multiprocessor: int = 1
    """programs"""
    elements: int = 32
    """weights of a unit in a thread at most: one is in use and three are on their way"""
    idle: float = 0.05
    """share of the time for which the last program of a product may be alone: so many rows make a unit at most"""
    keys: int = 64
    """of a tile"""
    few: int = 4
    """partial results of attention that every program adds up for itself"""
    ahead: int = 65536
    """bytes of its next weight that a program calls into L2 before it waits"""
    run: int = 0
    """units beyond those on their way that a program calls into L2; 0: none"""
    cooperative: bool = True
    """the driver is told that programs wait for each other, and refuses where they cannot all run"""


@dataclass(frozen=True, kw_only=True)
class StepPlace:
    """Where in the array of a step's numbers (int32) those of its sequence stand."""

    row: int
    position: int
    angle: int
    slot: int
    length: int


def refuses(model: StepModel, blocks: Tensor) -> str | None:
    """Why the launch cannot do a model."""
    first, dim = model.layers[0], blocks.shape[-1]
    weights = [w for layer in model.layers for w in _parts(layer)] + [model.embedding, model.norm, model.output]
    if any(w.dtype != blocks.dtype or not w.is_contiguous() or w.data_ptr() % 16 for w in weights):
        return "weights and cache are not all of one dtype, contiguous and aligned"
    if any(w.shape != v.shape for layer in model.layers for w, v in zip(_parts(layer), _parts(first), strict=True)):
        return "its layers differ"
    if dim < 32 or dim != power_of_two(dim) or model.cos.shape[-1] * 2 != dim:
        return "heads are not of 32, 64, 128… dims that all turn"
    if first.qkv.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "it sums in fp32"
    if blocks.shape[3] > num_programs(blocks, 1):
        return "it has more KV heads than the chip has multiprocessors"
    if max(first.qkv.shape[1], first.down.shape[1], model.heads * dim) > 32768:
        return "a row of its weights does not fit a program"
    return None


def _parts(layer: StepLayer) -> tuple[Tensor, ...]:
    same = (layer.qkv, layer.out, layer.up, layer.down, layer.attention_norm, layer.mlp_norm)
    return (*same, *(w for w in (layer.q_norm, layer.k_norm) if w is not None))


class WholeStep:
    """A model's addresses and buffers, and the launch."""

    def __init__(self, model: StepModel, blocks: Tensor, tables: Tensor, tokens: Tensor, place: StepPlace,
                 tuning: Tuning | None = None) -> None:  # fmt: skip
        """`blocks` [layers, pages, 2, KV heads, page size, D], `tables` [rows, pages], `tokens` [rows, positions]."""
        why = refuses(model, blocks)
        assert why is None, why
        self.model, self.blocks, self.tables, self.tokens, self.place = model, blocks, tables, tokens, place
        self.tuning = tuning or Tuning()
        first, device = model.layers[0], blocks.device
        self.hidden, self.ffn, self.kv_heads = first.qkv.shape[1], first.down.shape[1], blocks.shape[3]
        self.dim, self.programs = blocks.shape[5], num_programs(blocks, self.tuning.a_multiprocessor)
        self.splits = max(1, self.programs // self.kv_heads)
        addresses = [[w.data_ptr() for w in (*_parts(layer), first.qkv, first.qkv)[:8]] for layer in model.layers]
        self.layers = torch.tensor(addresses, dtype=torch.int64, device=device)
        wide = model.heads * self.dim

        def empty(size: int, dtype: torch.dtype = blocks.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.buffers = [empty(self.hidden), empty(self.hidden), empty(first.qkv.shape[0]), empty(wide),
                        empty(self.ffn), empty(self.splits * wide, torch.float32),
                        empty(self.splits * model.heads, torch.float32)]  # fmt: skip
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits = empty(len(model.output)).view(1, -1)

    def __call__(self, packed: Tensor) -> Tensor:
        """Logits [1, V] of the token that `packed` tells of; they are overwritten by the next call."""
        if self.blocks.is_cuda:
            self._launch(packed, 127, 0, len(self.model.layers))
        else:  # the interpreter runs one program after the other: they cannot wait for each other
            for layer in range(len(self.model.layers)):
                for phase in range(6):
                    self._launch(packed, 1 << phase, layer, layer + 1)
            self._launch(packed, 64, 0, 0)
        return self.logits

    def _launch(self, packed: Tensor, phases: int, first: int, last: int) -> None:
        from armillary.kernels.whole_step_triton import whole_step

        model, place, tuning = self.model, self.place, self.tuning
        options: dict[str, Any] = {"launch_cooperative_grid": True} if tuning.cooperative and packed.is_cuda else {}
        with on(packed):
            whole_step[(self.programs,)](
                self.layers, model.embedding, model.norm, model.output, packed, self.tokens, self.tables, model.cos,
                model.sin, self.blocks, *self.buffers, self.logits, self.counter,
                len(model.layers), first, last, model.eps, model.qk_eps, model.scale, len(model.output),
                self.tokens.stride(0), self.tables.stride(0), *self.blocks.stride()[:5], place.row, place.position,
                place.angle, place.slot, place.length, **self._sizes(), PHASES=phases, num_warps=tuning.warps,
                **options,
            )  # fmt: skip

    def _sizes(self) -> dict[str, Any]:
        model, tuning = self.model, self.tuning
        group, wide = model.heads // self.kv_heads, model.heads * self.dim
        first, on_gpu = model.layers[0], self.blocks.is_cuda
        pads = {"H_PAD": power_of_two(self.hidden), "Q_PAD": power_of_two(wide), "F_PAD": power_of_two(self.ffn)}
        pieces = {f"P_{name[0]}": max(1, min(tuning.warps, pad // 256)) for name, pad in pads.items()}
        return pads | pieces | {
            "NORM": model.layers[0].q_norm is not None, "HEADS": self.kv_heads, "GROUP": group, "D": self.dim,
            "PAGE": self.blocks.shape[4], "H": self.hidden, "F": self.ffn,
            "R_H": self._rows(len(first.qkv), self.hidden), "R_U": max(2, self._rows(2 * self.ffn, self.hidden)),
            "R_Q": self._rows(self.hidden, wide), "R_F": self._rows(self.hidden, self.ffn),
            "M": max(16, power_of_two(group)), "N": tuning.keys, "SPLITS": self.splits,
            "FEW": tuning.few, "SLICE": power_of_two(ceil_div(wide, self.programs)),
            "AHEAD": tuning.ahead if on_gpu else 0, "RUN": tuning.run if on_gpu else 0,
            "PRECISION": "tf32x3",
        }  # fmt: skip

    def _rows(self, rows: int, columns: int) -> int:
        """Rows of a weight in a unit: as many as registers hold, but so that programs have about equally many."""
        fit = max(1, 32 * self.tuning.warps * self.tuning.elements // power_of_two(columns))
        most = (1 + self.tuning.idle) * rows / self.programs
        while fit > 1 and ceil_div(ceil_div(rows, fit), self.programs) * fit > most:
            fit //= 2
        return fit

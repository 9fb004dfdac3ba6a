"""The input of a step as one int32 array, which is sent to the device, and to other ranks, in one copy; `Inputs` there.

The tokens themselves are on the device already.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from armillary.engine.request.pooling import Pooling

Ints = np.ndarray  # of int32

# T tokens, B sequences, G groups of layers, all padded


@dataclass(frozen=True)
class Shape:
    """Padded sizes of a step: steps of one shape share a CUDA graph."""

    tokens: int
    rows: int
    groups: int
    decodes: bool  # one token per sequence
    drafts: bool = False  # a sequence may have several such rows: its draft tokens
    adapters: bool = False  # a sequence has a LoRA adapter

    @property
    def max_query(self) -> int:
        return 1 if self.decodes else self.tokens

    @property
    def size(self) -> int:
        """Numbers of a step."""
        return (3 + self.groups) * self.tokens + 5 * self.rows + 1

    def parts(self) -> dict[str, tuple[int, int]]:
        """Name -> (offset, size) in the array."""
        return _parts(self)


@lru_cache(maxsize=4096)
def _parts(shape: Shape) -> dict[str, tuple[int, int]]:
    tokens, rows = shape.tokens, shape.rows
    sizes = {
        "rows_T": tokens,
        "positions_T": tokens,
        "angles_T": tokens,
        "slots_GT": shape.groups * tokens,
        "rows_B": rows,
        "writes_B": rows,
        "lasts_B": rows,
        "lengths_B": rows,
        "starts": rows + 1,
    }
    places, at = {}, 0
    for name, size in sizes.items():
        places[name] = (at, size)
        at += size
    return places


def null_step(shape: Shape, null_row: int) -> Ints:
    """A step of padding only."""
    ints: Ints = np.zeros(shape.size, dtype=np.int32)
    for name, (at, size) in shape.parts().items():
        if name in ("rows_T", "rows_B", "writes_B"):
            ints[at : at + size] = null_row
        elif name == "slots_GT":
            ints[at : at + size] = -1
    return ints


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A new row."""

    row: int
    tokens: bytes  # int32 each
    floats: tuple[float, ...]  # see device_rows.FLOATS
    ints: tuple[int, ...]  # see device_rows.INTS
    adapter: int = -1  # slot of its LoRA adapter; -1: none


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Sampling options of a sequence that the fast sampler does not have."""

    at: int  # index among the sequences of the step
    bias: tuple[tuple[int, float], ...] = ()  # tokens and what is added to their logits
    banned: tuple[int, ...] = ()  # end tokens that are forbidden so far
    penalised: bool = False
    num_top: int | None = None  # most likely tokens whose log-probabilities are wanted
    masked: bool = False  # its tokens are limited by a structure

    @property
    def changes(self) -> bool:
        """Whether its logits are changed before a token is drawn; else only their log-probabilities are wanted."""
        return self.penalised or self.masked or bool(self.bias) or bool(self.banned)


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Tokens of a prompt whose log-probabilities are wanted."""

    first: int  # place of the first among the tokens of the step
    size: int
    targets: tuple[int, ...]  # the token after each
    num_top: int  # and so many of the likeliest


@dataclass(frozen=True, kw_only=True)
class PooledTokens:
    """Tokens of a step that become part of a pooled prompt."""

    first: int  # place of the first among the tokens of the step
    size: int
    at: int  # index among the sequences of the step
    pooling: Pooling


@dataclass(kw_only=True)
class Step:
    """A step, ready to be run."""

    shape: Shape
    ints: Ints
    table_updates: Ints  # [2, n]: indices into the flat block tables, and their new entries
    copies: Ints  # [2, n]: source and target blocks
    known: Ints | None = None  # [3, n]: rows, positions and tokens that another stage has sampled
    drafts: Ints | None = None  # [3, n]: rows, positions and draft tokens, -1 where the draft model proposes them
    admitted: list[Admitted] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)  # empty: the fast sampler suffices
    prompts: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[PooledTokens] = field(default_factory=list)
    draws: bool = True
    is_empty: bool = False  # no sequence: padding alone, or with a shape without tokens nothing
    passes: list[tuple[Shape, Ints]] = field(default_factory=list)  # of the draft model, before the step's own

    def part(self, name: str) -> Ints:
        at, size = self.shape.parts()[name]
        return self.ints[at : at + size]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A step on the device."""

    shape: Shape
    packed: Tensor  # int32, the parts of the shape
    wide: Tensor  # the same, int64
    decode_inputs: Any = None
    """decode inputs gathered in one launch (kernels/paged/decode_inputs_triton.py); None: each gathered where used"""

    def narrow(self, name: str) -> Tensor:
        at, size = self.shape.parts()[name]
        return self.packed[at : at + size]

    def long(self, name: str) -> Tensor:
        at, size = self.shape.parts()[name]
        return self.wide[at : at + size]


def inputs_of(shape: Shape, packed: Tensor) -> Inputs:
    return Inputs(shape=shape, packed=packed, wide=packed.long())


def gathered(inputs: Inputs, hidden_TH: Tensor) -> Tensor:
    """[B, H]: the last token of each sequence."""
    return torch.index_select(hidden_TH, 0, inputs.long("lasts_B"))

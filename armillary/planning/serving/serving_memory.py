"""What a replica keeps on each device: weights, working memory, and the KV cache that the rest holds.

    weights      (layers / tp + experts / (tp·ep)) / pp · bytes a weight + (embedding + head) / tp · 2
    working      tokens of a step · (4·hidden + 3·MLP + QKV) · 2 + rows · vocabulary / tp · 4 + framework
    KV cache     memory · 0.9 − weights − working; a sequence takes Σ over layers of 2·kv_heads/tp·head_dim·tokens

Tokens are kept in blocks (Kwon et al., PagedAttention, arXiv 2309.06180), so a sequence takes whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from armillary.errors import BadInput
from armillary.planning.serving.replica import Replica
from armillary.spec.arithmetic.ops import size_of
from armillary.spec.arithmetic.params import kv_bytes, parameters
from armillary.spec.tables.serve import MEMORY_FRACTION, Serve
from armillary.units import bytes_text

FRAMEWORK_BYTES = 1.5e9
"""CUDA context, libraries, captured graphs, communication buffers"""
CPU_FRAMEWORK_BYTES = 0.43e9
"""torch and the tokenizer of an engine's process on a CPU, as seen on Linux; where it was measured, that counts"""
SCALES = {"int4": 4 / 32, "fp4": 1 / 16, "int8": 0.0, "fp8": 0.0}
"""bytes of scales a weight: 4-bit integers in groups of 32 with scale and zero, 4-bit floats in groups of 16"""


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Bytes on each device of a replica."""

    weights_bytes: float
    """weights, with their scales"""
    working_bytes: float
    """activations of the largest step, logits, framework"""
    room_bytes: float
    """what is left for the KV cache; below zero the model does not fit"""
    device_bytes: float
    """memory of the device"""

    @property
    def fits(self) -> bool:
        return self.room_bytes > 0


def serving_memory(replica: Replica, serve: Serve | None = None, usable: float | None = None) -> ServingMemory:
    """Weights, working memory and room for the KV cache on one device, of which `usable` is filled; none: as an engine
    does where nothing is said."""
    serve, usable = serve or Serve(), usable or usable_fraction(replica)
    memory = replica.cluster.chip.memory_bytes
    if not memory:
        raise BadInput(f"the memory of {replica.cluster.chip.title} is not known; name another chip with --on")
    weights, working = weight_bytes(replica), working_bytes(replica, serve)
    room = memory * (serve.memory_fraction or usable) - weights - working
    if serve.kv_bytes is not None:
        room = min(room, float(serve.kv_bytes)) if room > 0 else room
    return ServingMemory(weights_bytes=weights, working_bytes=working, room_bytes=room, device_bytes=memory)


def usable_fraction(replica: Replica) -> float:
    """Share of its device that an engine fills; the rest is left to the allocator and its neighbours."""
    return MEMORY_FRACTION["cpu" if replica.cluster.chip.kind == "cpu" else "gpu"]


def weight_bytes(replica: Replica) -> float:
    """Weights on one device; embedding and head stay in 16 bits."""
    counts, split = parameters(replica.config), replica.split
    ends = counts.embedding + counts.head + counts.positions
    experts, rest = counts.experts, counts.total - counts.experts - ends
    stored = size_of(replica.formats.weights) + SCALES.get(replica.formats.weights, 0.0)
    layers = (rest / split.tp + experts / (split.tp * split.ep)) / split.pp
    return layers * stored + ends / split.tp * size_of(replica.forward.dtype)


def working_bytes(replica: Replica, serve: Serve) -> float:
    """Activations of the largest step, logits of every running request, and the process itself."""
    return step_bytes(replica, serve) + _process_bytes(replica)


def step_bytes(replica: Replica, serve: Serve) -> float:
    """Activations of the largest step and logits of every running request."""
    mine, tokens = replica.forward.mine, serve.max_tokens_per_step
    widest = max(mine.ffn, mine.moe.ffn * mine.moe.top_k if mine.moe else 0)
    row = 4 * mine.hidden + 3 * widest + (mine.heads + 2 * mine.kv_heads) * mine.head_dim
    return tokens * row * size_of(replica.forward.dtype) + serve.max_running * mine.vocab * size_of("fp32")


def _process_bytes(replica: Replica) -> float:
    """Memory of the process besides its tensors; on a CPU, as measured with a small engine (planning/calibrate)."""
    if replica.cluster.chip.kind != "cpu":
        return FRAMEWORK_BYTES
    found = replica.measured.best("process", "resident_bytes", what="engine") if replica.measured else None
    return CPU_FRAMEWORK_BYTES if found is None else found


def sequence_bytes(replica: Replica, tokens: int, block_tokens: int = 16) -> float:
    """KV cache of one sequence of `tokens` on the device that has most of it."""
    blocks = ceil(tokens / block_tokens) * block_tokens
    stored = size_of(replica.formats.kv)
    return kv_bytes(replica.forward.mine, blocks, 1) * stored / replica.split.pp


def kv_capacity_tokens(replica: Replica, memory: ServingMemory) -> int:
    """Tokens the replica's cache holds, all ep ranks together, counted at the cost of a first token."""
    return int(max(0.0, memory.room_bytes) // sequence_bytes(replica, 1, 1)) * replica.split.ep


def concurrency(replica: Replica, memory: ServingMemory, tokens: int, block_tokens: int = 16) -> int:
    """Sequences of `tokens` each that the cache holds at once."""
    each = sequence_bytes(replica, tokens, block_tokens)
    return int(max(0.0, memory.room_bytes) // each) * replica.split.ep


def refuse_too_big(replica: Replica, memory: ServingMemory) -> None:
    """One sentence where weights and working memory leave no room, with the smallest change that would."""
    if memory.fits:
        return
    chip, split = replica.cluster.chip, replica.split
    needed = (memory.weights_bytes + memory.working_bytes) / usable_fraction(replica)
    factor = 2 ** max(1, ceil(needed / memory.device_bytes) - 1).bit_length()
    narrower = "" if size_of(replica.formats.weights) < 2 else " or --set layout.precision=fp8"
    raise BadInput(
        f"{replica.config.name} with {split.text()} needs {bytes_text(needed)} a device and {chip.title} has "
        f"{bytes_text(memory.device_bytes)}; try --set layout.tp={split.tp * factor}{narrower}"
    )

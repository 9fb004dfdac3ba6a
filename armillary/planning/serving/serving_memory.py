"""Memory per device of a replica: weights, working memory, and the KV cache in what is left.

    weights      (layers / tp + experts / (tp·ep)) / pp · bytes per weight + (embedding + head) / tp · 2
    working      tokens per step · (4·hidden + 3·MLP + QKV) · 2 + rows · vocabulary / tp · 4 + framework
    KV cache     memory · 0.9 − weights − working; a sequence takes Σ over layers of 2·kv_heads/tp·head_dim·tokens

Tokens are stored in blocks (Kwon et al., PagedAttention, arXiv 2309.06180), so a sequence takes full blocks.
"""

from dataclasses import dataclass, replace
from math import ceil

from armillary.errors import BadInput
from armillary.planning.serving.replica import Replica
from armillary.spec.arithmetic.ops import size_of
from armillary.spec.arithmetic.params import kv_bytes, parameters, state_bytes
from armillary.spec.tables.serve import MEMORY_FRACTION, Serve
from armillary.units import bytes_text

FRAMEWORK_BYTES = 1.5e9
"""CUDA context, libraries, captured graphs, communication buffers"""
CPU_FRAMEWORK_BYTES = 0.43e9
"""torch and the tokenizer of an engine's process on a CPU, seen on Linux; a measured value replaces it"""
SCALES = {"int4": 4 / 32, "fp4": 1 / 16, "int8": 0.0, "fp8": 0.0}
"""bytes of scales per weight: 4-bit integers in groups of 32 with scale and zero, 4-bit floats in groups of 16"""


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Bytes on each device of a replica."""

    weights_bytes: float
    working_bytes: float
    """activations of the largest step, logits, framework"""
    kv_bytes: float
    """what is left for the KV cache; below zero the model does not fit"""
    device_bytes: float

    @property
    def fits(self) -> bool:
        return self.kv_bytes > 0


def serving_memory(replica: Replica, serve: Serve | None = None, usable: float | None = None) -> ServingMemory:
    """Weights, working memory and KV cache on one device, of which `usable` is filled; None: the engine's default."""
    serve, usable = serve or Serve(), usable or usable_fraction(replica)
    memory = replica.cluster.chip.memory_bytes
    if not memory:
        raise BadInput(f"the memory of {replica.cluster.chip.title} is not known; name another chip with --on")
    weights, working = weight_bytes(replica), working_bytes(replica, serve)
    kv = memory * (serve.memory_fraction or usable) - weights - working
    if serve.kv_bytes is not None:
        kv = min(kv, float(serve.kv_bytes)) if kv > 0 else kv
    return ServingMemory(weights_bytes=weights, working_bytes=working, kv_bytes=kv, device_bytes=memory)


def usable_fraction(replica: Replica) -> float:
    """Share of its device that an engine fills; the rest is for the allocator and other processes."""
    return MEMORY_FRACTION["cpu" if replica.cluster.chip.kind == "cpu" else "gpu"]


def weight_bytes(replica: Replica) -> float:
    """Weights on one device; embedding and head stay in 16 bits. Of a quantized checkpoint, what its files hold."""
    if replica.stored is not None:
        return replica.stored.loaded_bytes(size_of(replica.forward.dtype)) / replica.split.num_devices
    counts, split = parameters(replica.config), replica.split
    ends = counts.embedding + counts.head + counts.positions
    experts, rest = counts.experts, counts.total - counts.experts - ends
    stored = size_of(replica.dtypes.weights) + SCALES.get(replica.dtypes.weights, 0.0)
    layers = (rest / split.tp + experts / (split.tp * split.ep)) / split.pp
    return layers * stored + ends / split.tp * size_of(replica.forward.dtype)


def working_bytes(replica: Replica, serve: Serve) -> float:
    """Activations of the largest step, logits of every running request, and the process itself."""
    return step_bytes(replica, serve) + _process_bytes(replica)


def step_bytes(replica: Replica, serve: Serve) -> float:
    """Activations of the largest step, logits and recurrent states of every running request."""
    local, tokens = replica.forward.local_config, serve.max_tokens_per_step
    widest = max(local.ffn, local.moe.ffn * local.moe.top_k if local.moe else 0)
    row = 4 * local.hidden + 3 * widest + (local.heads + 2 * local.kv_heads) * local.head_dim
    states = state_bytes(local, int(size_of(replica.forward.dtype))) / replica.split.pp
    logits = local.vocab * size_of("fp32")
    return tokens * row * size_of(replica.forward.dtype) + serve.max_running * (logits + states)


def _process_bytes(replica: Replica) -> float:
    """Memory of the process beside its tensors; on a CPU, as measured with a small engine (planning.calibrate)."""
    if replica.cluster.chip.kind != "cpu":
        return FRAMEWORK_BYTES
    measured = replica.measured.best("process", "resident_bytes", what="engine") if replica.measured else None
    return CPU_FRAMEWORK_BYTES if measured is None else measured


def sequence_bytes(replica: Replica, tokens: int, block_tokens: int = 16) -> float:
    """KV cache of one sequence of `tokens` on the device with the most of it. Recurrent states are held for every
    running sequence from the start (`step_bytes`)."""
    stored, config = ceil(tokens / block_tokens) * block_tokens, replica.forward.local_config
    if replica.keeps_chunks:
        full = (replace(kind, attention="full") if kind.attention == "chunked" else kind for kind in config.layers)
        config = replace(config, layers=tuple(full))
    return kv_bytes(config, stored, 1) * size_of(replica.dtypes.kv) / replica.split.pp


def kv_capacity_tokens(replica: Replica, memory: ServingMemory) -> int:
    """Tokens that the replica's cache holds, all ep ranks together, at the cost of a first token."""
    return concurrency(replica, memory, 1, 1)


def concurrency(replica: Replica, memory: ServingMemory, tokens: int, block_tokens: int = 16) -> int:
    """Sequences of `tokens` each that the cache holds at once."""
    return int(max(0.0, memory.kv_bytes) // sequence_bytes(replica, tokens, block_tokens)) * replica.split.ep


def refuse_too_big(replica: Replica, memory: ServingMemory) -> None:
    """BadInput where weights and working memory leave no KV cache, with the smallest change that would."""
    if memory.fits:
        return
    chip, split = replica.cluster.chip, replica.split
    needed = (memory.weights_bytes + memory.working_bytes) / usable_fraction(replica)
    factor = 2 ** max(1, ceil(needed / memory.device_bytes) - 1).bit_length()
    narrower = "" if size_of(replica.dtypes.weights) < 2 else " or --set layout.precision=fp8"
    raise BadInput(
        f"{replica.config.name} with {split.text()} needs {bytes_text(needed)} per device and {chip.title} has "
        f"{bytes_text(memory.device_bytes)}; try --set layout.tp={split.tp * factor}{narrower}"
    )

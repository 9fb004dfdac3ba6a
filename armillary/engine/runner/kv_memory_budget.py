"""Bytes that the KV cache may take: what serve.memory_fraction leaves once everything else has what it needs.

    GPU    fraction · memory − (in use after the largest step) − CUDA graphs
    CPU    fraction · (own + available memory) − own − activations of the largest step

The largest step is run, on padding alone, with weights in their last form (divided over ranks, converted). What others
use counts as in use. A CPU would take long for such a step, so there it is counted; its memory is that of the control
group where that is less than the machine's.
"""

import gc

import torch

from armillary.engine.runner.executor import FastExecutor
from armillary.errors import BadInput
from armillary.machine.memory import available_bytes, limit_bytes, resident_bytes
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import MEMORY_FRACTION
from armillary.units import bytes_text


def kv_budget(executor: FastExecutor, fraction: float | None, *, graphs: bool) -> int:
    """Bytes for the KV cache; `graphs` where they will be captured before the first request."""
    kind = executor.device.type
    share = MEMORY_FRACTION["cpu" if kind == "cpu" else "gpu"] if fraction is None else fraction
    total, used = _of_gpu(executor, graphs) if kind == "cuda" else _of_host(executor)
    budget = int(share * total - used)
    if budget <= 0:
        raise BadInput(
            f"{share:.0%} of {bytes_text(total)} of memory are full with {bytes_text(used)} of weights and "
            "working memory, and a KV cache has no place; raise serve.memory_fraction, lower "
            "serve.max_tokens_per_step or take a smaller model"
        )
    return budget


def _of_gpu(executor: FastExecutor, graphs: bool) -> tuple[float, float]:
    """(memory, what is not KV cache); the largest step's memory stays with the allocator, and a graph of it takes as
    much in a pool of its own."""
    torch.cuda.synchronize(executor.device)
    gc.collect()  # an engine of this process that nobody uses any more may still hold its cache
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info(executor.device)
    executor.run_largest()
    torch.cuda.synchronize(executor.device)
    after = torch.cuda.mem_get_info(executor.device)[0]
    torch.cuda.empty_cache()
    captured = executor.graph_bytes() if graphs else before - after
    return float(total), float(total - after + captured)


def _of_host(executor: FastExecutor) -> tuple[float, float]:
    available = available_bytes()
    if available is None:
        raise BadInput("this machine does not say how much memory is free; set serve.kv_bytes")
    own = resident_bytes()
    weight = next(executor.forward.model.parameters())
    step = step_bytes(executor.forward.model.config, executor.max_tokens, executor.max_running, weight.itemsize)
    states = executor.rows.states
    return min(limit_bytes(), available + own), own + step + (0 if states is None else states.nbytes)


def step_bytes(config: ModelConfig, tokens: int, rows: int, itemsize: int) -> float:
    """Activations of a step: of one layer for all tokens, and logits with what sampling makes of them for the rows."""
    widest = max(config.ffn or 0, config.moe.ffn * config.moe.top_k if config.moe else 0)
    mla = config.mla
    attention = 2 * (config.heads + 2 * config.kv_heads) * config.head_dim
    if mla is not None:
        attention = config.heads * (2 * (mla.nope_dim + mla.rope_dim) + 3 * (mla.kv_rank + mla.rope_dim) + mla.v_dim)
    layer = 4 * config.hidden + 3 * widest + attention
    return float(tokens * layer * itemsize + min(rows, tokens) * config.vocab * 3 * 4)

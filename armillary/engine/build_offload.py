"""What loading KV blocks from host memory costs here, and computing them again: both are timed when the engine starts.

block_s   a copy from the host of `_BLOCKS` blocks, per block
token_s   a step of `_TOKENS` prompt tokens on padding, per token
pair_s    token_s / context at which attention costs as much as all the rest of a token
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from armillary.engine.cache.kv_offload import OffloadCosts
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.step_input import Shape, null_step

_BLOCKS = 16
_TOKENS = {"cuda": 1024, "cpu": 32}
"""enough that weights are read once for many tokens on a GPU, few enough that a large model on a CPU starts soon"""
_RUNS = 3


def measured_costs(executor: FastExecutor, attention_tokens: float | None) -> OffloadCosts:
    """Costs of this model on this device; all ranks call this together."""
    host = executor.rows.host
    assert host is not None
    blocks, kind = executor.rows.blocks, executor.device.type
    count = min(_BLOCKS, blocks.shape[1] - 1, len(host.blocks) - 1)
    numbers = np.arange(1, count + 1, dtype=np.int32)
    outward, inward = np.stack([numbers, -numbers]), np.stack([-numbers, numbers])
    executor.rows.copy_blocks(outward)
    block_s = _fastest(lambda: executor.rows.copy_blocks(inward), executor.device) / count
    tokens, _ = executor.encoder.fit(min(_TOKENS[kind], executor.max_tokens), 1, False)
    shape = Shape(tokens, executor.encoder.fit(tokens, 1, False)[1], executor.encoder.groups, False)
    packed = executor.rows.send(null_step(shape, executor.max_running))
    with torch.inference_mode():
        token_s = _fastest(lambda: executor.run_padding(shape, packed), executor.device) / tokens
    return OffloadCosts(
        block_s=block_s, token_s=token_s, pair_s=token_s / attention_tokens if attention_tokens else 0.0
    )


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)

"""Scheduler settings: limits of a step, of the queue and of a request."""

from dataclasses import dataclass
from typing import Literal

from armillary.engine.scheduler.step_time import attention_dims
from armillary.errors import BadInput, BadRecipe
from armillary.spec.arithmetic.params import parameters
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve

STREAMED_SLOWDOWN = 2.0
"""default limit of a step with prefill over its decodes alone, where output is streamed. Measured
on an H200 (benchmarks/engine_h200.md, runs 13 to 16; 8B, 32 streams beside 32k-token prompts): at 2.0 the 99th
percentile of gaps is 1.96 to 1.98 times the median alone and prompts keep 60 to 63 % of their speed; without, gaps are
those of whole steps"""

Batching = Literal["none", "static", "dynamic", "continuous"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Scheduler settings of one engine."""

    max_model_len: int  # most tokens of prompt and output together
    vocab: int
    eos_ids: frozenset[int] = frozenset()
    max_tokens_per_step: int = 2048
    max_running: int = 256
    batching: Batching = "continuous"
    batch_window_s: float = 0.05  # dynamic batching: how long the first request of a batch waits for others
    ageing_s: float = 60.0  # waiting time that equals one priority level; 0: first come, first served
    max_waiting: int | None = None
    max_wait_s: float | None = None  # a request that has not started by then is aborted
    prefill_tokens: int | None = None  # most prefill tokens per step while others decode; none: what the step has left
    prefill_slowdown: float | None = None  # longest step with prefill over its decodes alone; none: no limit
    max_chunk: int | None = None  # most prefill tokens of one request per step, for shorter prompts' sake; none: all
    attention_tokens: float | None = None  # context where attention costs as much as the rest; none: not counted
    query_tile: int = 1  # queries per tile of prefill attention: a chunk costs as much as the next multiple
    reserve: float | None = None  # part of the blocks that sequences may still need to keep free; none: learnt
    rope_switch: int | None = None  # prompt length beyond which RoPE changes: no blocks are shared across it
    # masks are computed once the step before is updated, so structured sequences are scheduled ahead; else they wait
    late_masks: bool = False
    num_stages: int = 1  # pipeline stages: up to so many steps are in flight, each of other sequences
    lookups: int = 256  # most blocks looked up or freed per step
    check_every: int = 0  # steps between checks of all invariants; 0: never


_ATTENTION_RATE = 0.5
"""FLOP/s of prefill attention over those of GEMMs. Measured on an H200 (benchmarks/): 406 TFLOP/s alone, some 260
in short chunks; whole prompt steps 684"""


_TILE_ROWS = 128  # (query, head of a group) rows per tile of prefill attention on a GPU


def settings_for(config: ModelConfig, serve: Serve, eos_ids: frozenset[int] = frozenset()) -> Settings:
    """The recipe's [serve] table, for a model."""
    longest = config.context if serve.max_model_len is None else serve.max_model_len
    if longest > config.context:
        raise BadRecipe(
            f"serve.max_model_len={longest} exceeds the context of {config.name}; try --set "
            f"serve.max_model_len={config.context}"
        )
    return Settings(
        max_model_len=longest,
        vocab=config.vocab,
        eos_ids=eos_ids,
        max_tokens_per_step=serve.max_tokens_per_step,
        max_running=serve.max_running,
        batching=serve.batching,
        batch_window_s=serve.batch_window_s,
        ageing_s=serve.ageing_s,
        max_waiting=serve.max_waiting,
        max_wait_s=serve.max_wait_s,
        prefill_tokens=serve.prefill_tokens,
        prefill_slowdown=serve.prefill_slowdown,
        attention_tokens=attention_tokens(config),
        check_every=serve.check_every,
        rope_switch=rope_switch(config),
        num_stages=serve.pp,
        query_tile=max(1, _TILE_ROWS // (config.heads if config.mla else config.heads // config.kv_heads)),
    )


def check_step_budget(max_tokens_per_step: int, max_running: int) -> None:
    """BadInput where a step has not a token for each sequence that decodes."""
    if max_tokens_per_step < max_running:
        raise BadInput(
            f"a step of {max_tokens_per_step} tokens cannot decode {max_running} sequences; "
            f"set serve.max_running={max_tokens_per_step} or less"
        )


def rope_switch(config: ModelConfig) -> int | None:
    """Length beyond which RoPE frequencies change (longrope); none where they never do."""
    if config.positions != "rope" or config.rope.scaling != "longrope":
        return None
    return config.rope.original_context or config.context


def attention_tokens(config: ModelConfig) -> float:
    """Context at which a token's attention (2·heads FLOPs per dim of key and value, key and full layer) takes as long
    as its GEMMs (2 FLOPs per weight): paged attention achieves about half of their FLOP/s."""
    full = sum(layer.attention == "full" for layer in config.layers)
    weights = parameters(config).multiplied - config.vocab * config.hidden  # only a prompt's last token needs the head
    return _ATTENTION_RATE * 2 * weights / (2 * config.heads * attention_dims(config) * full) if full else float("inf")

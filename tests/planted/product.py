"""Problems of the product loop: a cache too small, batches too small or rigid, prompts in the way, too few replicas."""

from __future__ import annotations

from pathlib import Path

from armillary.spec.arithmetic.params import kv_bytes_per_token
from armillary.store.home import Home
from tests.planted.problem import ACTION, Problem, Wish
from tests.planted.serve_small import Arrival, rates, serve_small, serving_recipe
from tests.planted.traffic import asked, at_once, at_rate, mixed, sharing

_KV_DTYPE_BYTES = 2
_LONGEST = 512
_LONG = 1900
"""tokens of a prompt or an answer that still fit beside a short one in a sequence (serve_small)"""
_ROWS = 16
"""requests that run together where nothing else is said (serve_small)"""
_MANY_ROWS = 64
"""as many as help on a small machine: what waits then waits for a second one"""


def small_kv_cache(wish: Wish, home: Home) -> Path:
    """Blocks for a few of the requests that could run together, each of which goes on growing."""
    asked_for = mixed(40, tokens_in=(32, 64), tokens_out=(128, 192), seed=wish.seed)
    room = max(_LONGEST, round(_ROWS * 208 / (1 + 3 * wish.severity)))
    return serve_small(wish, home, at_once(asked_for), serve={"kv_bytes": _kv_bytes(wish, room), **_short()})


def no_chunks(wish: Wish, home: Home) -> Path:
    """Long prompts go in whole among requests that are being answered, the more of them at once the worse it is."""
    together = max(1, round(2 * wish.severity))
    long = min(_LONG, round(2400 * wish.severity / together))
    chats = mixed(8, tokens_in=(16, 32), tokens_out=(200, 220), seed=wish.seed)
    lasts_s = len(chats) / max(rates(serving_recipe(wish, {}), chats, times=2))
    essays = mixed(8 * together, tokens_in=(long, long + 100), tokens_out=(4, 8), seed=wish.seed + 1, name="long")
    first = at_rate(essays[::together], 8 / lasts_s, wish.seed)
    arrivals = [Arrival(request=one, at_s=first[i // together].at_s) for i, one in enumerate(essays)]
    return serve_small(
        wish, home, [*at_once(chats), *arrivals], serve={"prefill_tokens": None, "max_tokens_per_step": 8192}
    )


def no_prefix_cache(wish: Wish, home: Home) -> Path:
    """All prompts begin with the same instructions, which are computed for each again."""
    shared = min(_LONG, round(400 * wish.severity))
    requests = sharing(40, prefixes=1, prefix_tokens=shared, tokens_in=16, tokens_out=16, seed=wish.seed)
    return serve_small(wish, home, at_once(requests), serve={"prefix_cache": False})


def small_prefix_cache(wish: Wish, home: Home) -> Path:
    """More beginnings than the cache has room for beside what runs: each is gone when it comes again."""
    prefixes, room = max(_ROWS + 6, round(36 * wish.severity)), (_ROWS + 2) * 290
    requests = sharing(3 * prefixes, prefixes=prefixes, prefix_tokens=256, tokens_in=16, tokens_out=8, seed=wish.seed)
    return serve_small(wish, home, at_once(requests), serve={"kv_bytes": _kv_bytes(wish, room), **_short()})


def small_batch(wish: Wish, home: Home) -> Path:
    """Few requests may run together while many wait."""
    requests = mixed(24, tokens_in=(16, 64), tokens_out=(24, 48), seed=wish.seed)
    return serve_small(wish, home, at_once(requests), serve={"max_running": max(1, round(2 / wish.severity))})


def one_at_a_time(wish: Wish, home: Home) -> Path:
    """Requests come by the clock, faster than a server of one row answers them."""
    requests = mixed(60, tokens_in=(16, 48), tokens_out=(24, 48), seed=wish.seed)
    alone = serving_recipe(wish, {"serve": {"max_running": 1}})
    rate = max(rates(alone, requests[:8])) * (1 + wish.severity)
    return serve_small(wish, home, at_rate(requests, rate, wish.seed), serve={"max_running": 1})


def large_chunks(wish: Wish, home: Home) -> Path:
    """Chunks so large that a step with one is many times as long as a step without."""
    chats = mixed(8, tokens_in=(16, 32), tokens_out=(200, 220), seed=wish.seed)
    lasts_s = len(chats) / max(rates(serving_recipe(wish, {}), chats, times=2))
    essays = mixed(10, tokens_in=(_LONG - 100, _LONG), tokens_out=(4, 8), seed=wish.seed + 1, name="long")
    chunk = min(_LONG, max(1024, round(1400 * wish.severity)))
    return serve_small(
        wish,
        home,
        [*at_once(chats), *at_rate(essays, 10 / lasts_s, wish.seed)],
        serve={"prefill_tokens": chunk, "max_tokens_per_step": 4096},
    )


def long_answers(wish: Wish, home: Home) -> Path:
    """Answers outgrow the cache: requests are let in while short, and put out again."""
    requests = mixed(32, tokens_in=(16, 32), tokens_out=(300, 400), seed=wish.seed)
    room = max(_LONGEST, round(_ROWS * 400 / (1.5 + 2 * wish.severity)))
    return serve_small(wish, home, at_once(requests), serve={"kv_bytes": _kv_bytes(wish, room), **_short()})


def static_batches(wish: Wish, home: Home) -> Path:
    """A batch is begun only when the one before is over, and its answers differ in length."""
    longest = min(_LONG, max(16, round(96 * wish.severity)))
    requests = mixed(48, tokens_in=(16, 64), tokens_out=(4, longest), seed=wish.seed)
    return serve_small(wish, home, at_once(requests), serve={"batching": "static", "max_running": 8})


def too_much_traffic(wish: Wish, home: Home) -> Path:
    """Well set, but more comes than one engine bears."""
    requests = mixed(240, tokens_in=(32, 96), tokens_out=(24, 48), seed=wish.seed)
    wide = {"serve": {"max_running": _MANY_ROWS}}
    rate = max(rates(serving_recipe(wish, wide), requests[:_MANY_ROWS])) * (1 + 2 * wish.severity)
    return serve_small(wish, home, at_rate(requests, rate, wish.seed), **wide)


def small_chunks(wish: Wish, home: Home) -> Path:
    """Prompts go in by so few tokens a step that most steps are hardly filled."""
    requests = [
        asked(f"r{i}", one.prompt, 8)
        for i, one in enumerate(mixed(24, tokens_in=(384, 512), tokens_out=(8, 8), seed=wish.seed))
    ]
    few = max(16, round(32 / wish.severity))
    return serve_small(wish, home, at_once(requests), serve={"max_tokens_per_step": few, "prefill_tokens": None})


def _kv_bytes(wish: Wish, tokens: int) -> int:
    config = serving_recipe(wish, {}).model_config()
    return round(kv_bytes_per_token(config, _KV_DTYPE_BYTES) * tokens)


def _short() -> dict[str, int]:
    return {"max_model_len": _LONGEST}


PROBLEMS = (
    Problem(
        name="small-kv-cache",
        says="a KV cache for a few requests",
        make=small_kv_cache,
        loop="product",
        causes=("kv_pressure", "preemption"),
        levers=("serve.kv_bytes", "serve.kv_dtype"),
    ),
    Problem(
        name="no-chunks",
        says="long prompts whole among answers",
        make=no_chunks,
        loop="product",
        causes=("prefill_interference",),
        levers=("serve.prefill_tokens", "serve.prefill_slowdown", "serve.max_tokens_per_step"),
    ),
    Problem(
        name="no-prefix-cache",
        says="equal beginnings, prefix cache off",
        make=no_prefix_cache,
        loop="product",
        causes=("cache_misses",),
        levers=("serve.prefix_cache",),
    ),
    Problem(
        name="small-prefix-cache",
        says="more beginnings than the cache holds",
        make=small_prefix_cache,
        loop="product",
        causes=("cache_misses",),
        levers=("serve.kv_bytes",),
    ),
    Problem(
        name="small-batch",
        says="two requests at a time",
        make=small_batch,
        loop="product",
        causes=("batch_too_small",),
        levers=("serve.max_running",),
    ),
    Problem(
        name="one-at-a-time",
        says="a server of one row",
        make=one_at_a_time,
        loop="product",
        causes=("batch_too_small",),
        levers=("serve.max_running",),
    ),
    Problem(
        name="large-chunks",
        says="prompts in chunks of a thousand",
        make=large_chunks,
        loop="product",
        causes=("prefill_interference",),
        levers=("serve.prefill_tokens", "serve.prefill_slowdown", "serve.max_tokens_per_step"),
    ),
    Problem(
        name="long-answers",
        says="answers that outgrow the cache",
        make=long_answers,
        loop="product",
        causes=("kv_pressure", "preemption"),
        levers=("serve.kv_bytes", "serve.kv_dtype", "serve.max_running"),
    ),
    Problem(
        name="static-batches",
        says="batches begun and ended together",
        make=static_batches,
        loop="product",
        causes=("static_batching",),
        levers=("serve.batching",),
    ),
    Problem(
        name="too-much-traffic",
        says="more than one replica bears",
        make=too_much_traffic,
        loop="product",
        causes=("too_few_replicas",),
        levers=(ACTION,),
    ),
    Problem(
        name="small-chunks",
        says="prompts by few tokens per step",
        make=small_chunks,
        loop="product",
        causes=("queueing",),
        levers=("serve.max_tokens_per_step", "serve.prefill_tokens"),
    ),
)

"""Problems of other programs: logs of torchtitan and Megatron-LM and pages of vLLM, written by small models of them.

They are not live: what a real trainer or server would write is simulated, with noise, at a severity and a seed of their
own. They test that a log alone leads to cause and flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from armillary.spec.gauges import Loop
from armillary.store.home import Home
from tests.diagnosis.data.make_vllm_pages import Case, pages
from tests.diagnosis.logs import megatron_log, titan_log
from tests.planted.problem import Problem, Wish

STEP_S = 1.12
NOISE = 0.02
"""relative standard deviation of a step"""


def noisy(wish: Wish, seconds: Callable[[int], float] = lambda step: STEP_S) -> Callable[[int], float]:
    """Seconds of a step, a little different each time."""
    return lambda step: seconds(step) * max(0.5, Random(1_000_003 * wish.seed + step).gauss(1.0, NOISE))


def titan_saving(wish: Wish) -> str:
    """A checkpoint that everyone waits for takes a sixth of the time at severity 1."""
    every = Random(wish.seed).choice((40, 50, 80))
    return titan_log(steps=600, step_s=noisy(wish), save=every, save_s=0.2 * wish.severity * every * STEP_S)


def megatron_validating(wish: Wish) -> str:
    every = Random(wish.seed).choice((40, 50, 60))
    return megatron_log(validate=every, validate_s=0.25 * wish.severity * every * 1.2)


def megatron_saving(wish: Wish) -> str:
    every = Random(wish.seed).choice((40, 50, 60))
    return megatron_log(save=every, save_s=0.25 * wish.severity * every * 1.2)


def titan_hiccups(wish: Wish) -> str:
    """Something that the log does not name takes time in a rhythm."""
    every, lost = Random(wish.seed).choice((40, 50, 60)), 20.0 * wish.severity
    base = noisy(wish)
    return titan_log(steps=600, step_s=lambda step: base(step) + (lost if step % every == 0 else 0.0))


def titan_slowing(wish: Wish) -> str:
    """Steps grow by half of the first ones' time over the run, as on a device that gets hot."""
    drift = 0.5 * wish.severity
    return titan_log(steps=400, step_s=noisy(wish, lambda step: STEP_S * (1 + drift * step / 400)))


def titan_full_memory(wish: Wish) -> str:
    """The allocator frees and asks again: steps differ, the more the worse."""
    dice = Random(wish.seed)
    extra = [dice.random() * 0.9 * wish.severity for _ in range(301)]
    retries = (f"{dice.randint(20, 80)} CUDA memory allocation retries.",)
    return titan_log(memory=dice.uniform(98.5, 99.5), step_s=lambda step: STEP_S + extra[step], more=retries)


def titan_recompute(wish: Wish) -> str:
    return titan_log(recompute="full", memory=max(20.0, 40.0 - 8 * wish.severity), step_s=noisy(wish))


def titan_low_mfu(wish: Wish) -> str:
    seconds = 3.2 * max(0.8, wish.severity)
    return titan_log(step_s=noisy(wish, lambda step: seconds))


def megatron_bubble(wish: Wish) -> str:
    """Four stages with as many micro-batches, or fewer or more by severity."""
    batch = min((16, 32, 64), key=lambda one: abs(one - 24 / wish.severity))
    return megatron_log(global_batch_size=batch, step_s=Random(wish.seed).uniform(0.8, 2.5))


def vllm_small_batch(wish: Wish) -> str:
    running = Random(wish.seed).choice((24, 32, 40))
    return _page(wish, Case(clients=round(running * (2 + 3 * wish.severity)), max_num_seqs=running))


def vllm_full_cache(wish: Wish) -> str:
    blocks = round(3600 / (1 + 0.4 * wish.severity))
    return _page(wish, Case(clients=256, num_gpu_blocks=blocks, tokens_out=400))


def vllm_overload(wish: Wish) -> str:
    return _page(wish, Case(clients=0, rate=26.0 + 10.0 * wish.severity, tokens_in=2400, tokens_out=40))


def vllm_adapters(wish: Wish) -> str:
    """Requests of more adapters than a step may have: each waits for the slot of another."""
    slots, names = Random(wish.seed).choice((1, 2, 4)), [f"tenant-{i}" for i in range(40)]
    running = Random(wish.seed).choice((24, 32, 40))
    text = _page(wish, Case(clients=round(running * (2 + 3 * wish.severity)), max_num_seqs=running))
    waiting = ",".join(names[slots : slots + max(1, round(6 * wish.severity))])
    labels = f'max_lora="{slots}",running_lora_adapters="{",".join(names[:slots])}",waiting_lora_adapters="{waiting}"'
    return f"# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{{{labels}}} 1.7e+09\n{text}"


def vllm_long_prompts(wish: Wish) -> str:
    tokens = round(5000 * max(0.8, wish.severity**0.5))
    return _page(wish, Case(clients=24, tokens_in=tokens, tokens_out=400, max_num_batched_tokens=8192))


def _page(wish: Wish, case: Case) -> str:
    return next(pages(replace(case, seed=wish.seed + 1, seconds=90.0)))


# --- healthy


def titan_healthy(wish: Wish) -> str:
    return titan_log(save=100, save_s=2.0, step_s=noisy(wish))


def megatron_healthy(wish: Wish) -> str:
    return megatron_log(save=150, save_s=5.0, validate=100, validate_s=2.0)


def vllm_healthy(wish: Wish) -> str:
    return _page(wish, Case(clients=Random(wish.seed).randint(8, 32)))


def _problem(
    name: str,
    says: str,
    text: Callable[[Wish], str],
    loop: Loop | None,
    causes: tuple[str, ...] = (),
    levers: tuple[str, ...] = (),
) -> Problem:
    """One whose program writes `text`, a metrics page for servers and a log for trainers."""

    def make(wish: Wish, home: Home) -> Path:
        kind = "prom" if name.startswith("vllm") else "log"
        path = home.work / f"{name}-{wish.seed}-{wish.severity:g}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(wish))
        return path

    return Problem(name=name, says=says, make=make, loop=loop, causes=causes, levers=levers, simulated=True)


_SAVES = ("--checkpoint.async_mode", "--checkpoint.interval")
_VLLM = "product"
PROBLEMS = (
    _problem(
        "titan-saving", "torchtitan waits for checkpoints", titan_saving, "training", ("checkpoint_stall",), _SAVES
    ),
    _problem(
        "megatron-saving",
        "Megatron-LM waits for checkpoints",
        megatron_saving,
        "training",
        ("checkpoint_stall",),
        ("--async-save", "--save-interval"),
    ),
    _problem(
        "megatron-validating",
        "Megatron-LM validates often",
        megatron_validating,
        "training",
        ("validation_stall",),
        ("--eval-interval", "--eval-iters"),
    ),
    _problem("titan-hiccups", "a rhythm nobody explains", titan_hiccups, "training", ("checkpoint_stall",), ("*",)),
    _problem("titan-slowing", "steps become longer", titan_slowing, "training", ("straggler",), ("*",)),
    _problem(
        "titan-full-memory", "the allocator tries again", titan_full_memory, "training", ("memory_pressure",), ("*",)
    ),
    _problem(
        "titan-recompute",
        "all recomputed, memory free",
        titan_recompute,
        "training",
        ("needless_recompute",),
        ("--activation_checkpoint.mode",),
    ),
    _problem("titan-low-mfu", "a tenth of the chip's peak", titan_low_mfu, "inner", ("compute",), ("*",)),
    _problem(
        "megatron-bubble",
        "few micro-batches for four stages",
        megatron_bubble,
        "training",
        ("bubble",),
        ("--num-layers-per-virtual-pipeline-stage", "--global-batch-size"),
    ),
    _problem(
        "vllm-small-batch", "requests wait for rows", vllm_small_batch, _VLLM, ("batch_too_small",), ("--max-num-seqs",)
    ),
    _problem(
        "vllm-full-cache",
        "too few KV blocks",
        vllm_full_cache,
        _VLLM,
        ("preemption", "kv_pressure"),
        ("--kv-cache-dtype", "--gpu-memory-utilization"),
    ),
    _problem("vllm-adapters", "too few adapter slots", vllm_adapters, _VLLM, ("adapter_thrashing",), ("--max-loras",)),
    _problem("vllm-overload", "more comes than is served", vllm_overload, _VLLM, ("too_few_replicas",), ("one",)),
    _problem(
        "vllm-long-prompts",
        "long prompts between tokens",
        vllm_long_prompts,
        _VLLM,
        ("prefill_interference",),
        ("--max-num-batched-tokens",),
    ),
)
HEALTHY = (
    _problem("titan-healthy", "torchtitan, well set", titan_healthy, None),
    _problem("megatron-healthy", "Megatron-LM, well set", megatron_healthy, None),
    _problem("vllm-healthy", "vLLM with room", vllm_healthy, None),
)

"""Logs of other trainers, line for line in their form: torchtitan's metrics lines and Megatron-LM's iterations.

Forms: torchtitan/components/metrics.py and checkpoint.py (2025 to 2026), Megatron-LM megatron/training/training.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

BEGIN = datetime(2026, 3, 1, 12, 0, 0)
TOKENS, TOKEN_FLOPS, PEAK = 8192, 58.9e9, 989e12
COLOURS = ("\x1b[31m", "\x1b[32m", "\x1b[38;2;180;60;0m", "\x1b[38;2;54;234;195m", "\x1b[34m", "\x1b[36m", "\x1b[35m")


def titan_log(
    *,
    steps: int = 300,
    step_s: Callable[[int], float] = lambda step: 1.12,
    memory: float = 72.0,
    save: int = 0,
    save_s: float = 0.0,
    ranks: int = 1,
    colours: bool = False,
    recompute: str = "selective",
    more: tuple[str, ...] = (),
) -> str:
    """A run of torchtitan on H100s, a line every ten steps; `save` says how often it saves, and `save_s` how long."""
    return "\n".join(_titan(steps, step_s, memory, save, save_s, ranks, colours, recompute, more)) + "\n"


def _titan(
    steps: int,
    step_s: Callable[[int], float],
    memory: float,
    save: int,
    save_s: float,
    ranks: int,
    colours: bool,
    recompute: str,
    more: tuple[str, ...],
) -> Iterator[str]:
    now = BEGIN

    def said(text: str) -> Iterator[str]:
        stamp = f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}"
        for rank in range(ranks):
            yield f"[rank{rank}]:[titan] {stamp} - root - INFO - {text}"

    yield from said("CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory")
    yield from said("Model llama3 8B size: 8,030,261,248 total parameters")
    yield from said(f"Applied {recompute} activation checkpointing to the model")
    yield from said("Peak FLOPS used for computing MFU: 9.890e+14")
    yield from said(
        "Trainer is initialized with local batch size 1, global batch size 8, gradient accumulation "
        f"steps 1, sequence length {TOKENS}, total steps {steps}"
    )
    last = now
    for step in range(1, steps + 1):
        now += timedelta(seconds=step_s(step) + (30 if step == 1 else 0))
        if step % 10 == 0 or step == 1:
            each = (now - last).total_seconds() / (1 if step == 1 else 9 if step == 10 else 10)
            last = now
            yield from said(_metrics(step, each, memory, colours))
        if save and step % save == 0:
            yield from said("Saving the checkpoint (or staging if async is enabled).")
            now += timedelta(seconds=save_s)
            yield from said(f"Finished saving the checkpoint (or staging if async is enabled)in {save_s:.2f} seconds.")
    for line in more:
        yield from said(line)


def _metrics(step: int, each: float, memory: float, colours: bool) -> str:
    rate = TOKENS / each
    parts = (
        f"step: {step:2}  ",
        f"loss: {12 * 0.995**step:7.4f}  ",
        f"grad_norm: {1.5:7.4f}  ",
        f"memory: {79.1 * memory / 100:5.2f}GiB({memory:.2f}%)  ",
        f"tps: {rate:,.0f}  ",
        f"tflops: {rate * TOKEN_FLOPS / 1e12:,.2f}  ",
        f"mfu: {rate * TOKEN_FLOPS / PEAK:.2%}",
    )
    return "".join(colour * colours + part for colour, part in zip(COLOURS, parts, strict=True)) + "\x1b[39m" * colours


ARGUMENTS = {
    "global_batch_size": 256,
    "micro_batch_size": 1,
    "world_size": 64,
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 4,
    "num_layers": 48,
    "seq_length": 4096,
    "recompute_granularity": "selective",
}


def megatron_log(
    *,
    iterations: int = 300,
    step_s: float = 1.2,
    save: int = 0,
    save_s: float = 0.0,
    validate: int = 0,
    validate_s: float = 0.0,
    old_timers: bool = False,
    **arguments: object,
) -> str:
    """A run of Megatron-LM; its arguments as it prints them, a line every ten iterations, timers and memory once."""
    told = ARGUMENTS | arguments
    lines = [
        "------------------------ arguments ------------------------",
        *(f"  {name} {'.' * (48 - len(name))} {value}" for name, value in told.items()),
        "-------------------- end of arguments ---------------------",
    ]
    now = BEGIN
    for step in range(1, iterations + 1):
        now += timedelta(seconds=step_s)
        if step % 10 == 0:
            lines.append(_iteration(now, step, iterations, step_s, int(str(told["global_batch_size"]))))
            lines += _timers(old_timers) if step == 10 else []
        if validate and step % validate == 0:
            now += timedelta(seconds=validate_s)
            lines.append(f" validation loss at iteration {step} | lm loss value: 5.1E+00 | lm loss PPL: 1.64E+02 |")
        if save and step % save == 0:
            lines.append(f"saving checkpoint at iteration {step:7d} to checkpoints in torch_dist format")
            now += timedelta(seconds=save_s)
            lines.append(f"  successfully saved checkpoint from iteration {step:7d} to checkpoints")
    return "\n".join(lines) + "\n"


def _iteration(now: datetime, step: int, of: int, step_s: float, batch: int) -> str:
    return (
        f" [{now:%Y-%m-%d %H:%M:%S}.{now.microsecond:06d}] iteration {step:8d}/{of:8d} | consumed samples: "
        f"{step * batch:12d} | elapsed time per iteration (ms): {step_s * 1e3:.1f} | throughput per GPU "
        f"(TFLOP/s/GPU): 220.5 | learning rate: 1.342000E-04 | global batch size: {batch:5d} | lm loss: "
        "7.399415E+00 | loss scale: 1.0 | grad norm: 2.918 | number of skipped iterations:   0 | number of nan "
        "iterations:   0 |"
    )


def _timers(old: bool) -> list[str]:
    memory = (
        "[Rank 0] (after 10 iterations) memory (MB) | allocated: 11012.5 | max allocated: 30000.0 | reserved: "
        "31000.0 | max reserved: 32000.0"
    )
    if old:
        return [
            memory,
            "time (ms) | forward-compute: 553.79 | backward-compute: 538.84 | backward-params-all-reduce: "
            "30.00 | optimizer: 50.00 | batch-generator: 2.00",
        ]
    return [
        memory,
        "(min, max) time across ranks (ms):",
        "    forward-backward ...............................: (1000.10, 1100.20)",
        "    all-grads-sync .................................: (30.00, 60.00)",
        "    optimizer ......................................: (50.00, 52.00)",
        "    batch-generator ................................: (2.00, 9.00)",
    ]

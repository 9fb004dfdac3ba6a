"""Rules on the settings in other programs' logs: pipeline stages, recompute, and low MFU."""

from statistics import median

from armillary.diagnosis.evidence.finding import Evidence, Finding, Lever, Rule
from armillary.diagnosis.evidence.thresholds import BUBBLE_SHARE, RECOMPUTE_MEMORY_SHARE, WELL_SET_GEMM_SHARE
from armillary.diagnosis.readings.log_lines import number
from armillary.diagnosis.readings.reading import Reading
from armillary.errors import BadInput
from armillary.machine.gpus import Gpu
from armillary.machine.machine import chip_of
from armillary.planning.device_model.efficiency import curves
from armillary.profiling.analysis.amdahl import speedup
from armillary.spec.plan import Plan

RECOMPUTE_FLOPS_SHARE = {"full": 1 / 4, "fullac": 1 / 4}
"""share of a step's FLOPs that full recompute takes: one more forward beside a forward and a backward"""


def idle_stages(reading: Reading, plan: Plan | None) -> Finding | None:
    """A pipeline with few micro-batches, by its arguments: idle (p − 1) / (v·m + p − 1) of the time (Narayanan et al.,
    arXiv 2104.04473)."""
    shape = _pipeline(reading)
    if shape is None:
        return None
    stages, virtual, count, layers = shape
    share = _idle(stages, virtual, count)
    if share < BUBBLE_SHARE:
        return None
    levers = []
    each = layers // (stages * virtual) if layers else 0
    if each > 1 and each % 2 == 0 and count % stages == 0:
        action, then = f"--num-layers-per-virtual-pipeline-stage {each // 2}", _idle(stages, 2 * virtual, count)
        levers.append(_pipe_lever("twice the virtual stages", action, share, then, "twice the exchanges"))
    batch = number(reading.settings.get("global_batch_size")) or 0.0
    levers.append(
        _pipe_lever(
            "twice the micro-batches per step",
            f"--global-batch-size {2 * batch:.0f}",
            share,
            _idle(stages, virtual, 2 * count),
            "a larger batch learns less per token",
        )
    )
    step_s = reading.get("step_s") or 0.0
    evidence = (Evidence(gauge="micro_batches", value=count), Evidence(gauge="bubble_s", value=share * step_s))
    return Finding(
        loop="training",
        cause="bubble",
        rule="idle_stages",
        share=share,
        evidence=evidence,
        levers=tuple(sorted(levers, key=lambda lever: -lever.speedup)),
        says=f"{count:.0f} micro-batches per step are few for {stages} pipeline stages: they stand idle "
        f"{share:.0%} of the time",
    )


def _pipeline(reading: Reading) -> tuple[int, int, float, int] | None:
    """(stages, virtual stages of each, micro-batches, layers); None where the log does not say or there is no pipe."""

    def setting(name: str, otherwise: float = 0.0) -> float:
        return number(reading.settings.get(name)) or otherwise

    stages = int(setting("pipeline_model_parallel_size", 1))
    batch, micro, world = setting("global_batch_size"), setting("micro_batch_size"), setting("world_size")
    if stages < 2 or not (batch and micro and world):
        return None
    split = setting("tensor_model_parallel_size", 1) * stages * setting("context_parallel_size", 1)
    count = batch / micro / max(1.0, setting("data_parallel_size") or world / split)
    layers = int(setting("num_layers"))
    each = setting("num_layers_per_virtual_pipeline_stage")
    derived = int(layers / stages / each) if each and layers else 1
    return stages, max(1, int(setting("virtual_pipeline_model_parallel_size")) or derived), count, layers


def _idle(stages: int, virtual: int, count: float) -> float:
    return (stages - 1) / (virtual * count + stages - 1)


def _pipe_lever(title: str, action: str, now: float, then: float, risk: str) -> Lever:
    return Lever(
        title=title,
        action=action,
        speedup=(1 - then) / (1 - now),
        risk=risk,
        basis="idle time of the pipeline's schedule",
    )


def recompute_with_room(reading: Reading, plan: Plan | None) -> Finding | None:
    """Full recompute although half of the device's memory is free."""
    kind = reading.settings.get("recompute", reading.settings.get("recompute_granularity", "")).lower()
    used = max(reading.series("memory_used_fraction"), default=None)
    if (
        reading.by not in ("torchtitan", "megatron")
        or kind not in RECOMPUTE_FLOPS_SHARE
        or used is None
        or used > RECOMPUTE_MEMORY_SHARE
    ):
        return None
    share = RECOMPUTE_FLOPS_SHARE[kind]
    action = (
        "--activation_checkpoint.mode=selective" if reading.by == "torchtitan" else "--recompute-granularity selective"
    )
    lever = Lever(
        title="recompute less",
        action=action,
        speedup=speedup(share, float("inf")),
        basis="at most: FLOPs of a step, 6 instead of 8 per weight and token",
        risk=f"more memory: {used:.0%} are in use now",
    )
    evidence = Evidence(gauge="memory_used_fraction", value=used, expected=RECOMPUTE_MEMORY_SHARE, against="roomy")
    return Finding(
        loop="training",
        cause="needless_recompute",
        rule="recompute_with_room",
        share=share,
        evidence=(evidence,),
        levers=(lever,),
        says=f"a quarter of the arithmetic recomputes activations, and {1 - used:.0%} of the memory is free",
    )


def low_mfu(reading: Reading, plan: Plan | None) -> Finding | None:
    """Far less of the GEMM speed than runs on this chip usually keep; a trace would say why."""
    rates = _mfu_and_gemm(reading)
    if rates is None:
        return None
    mfu, gemm = rates
    usual = WELL_SET_GEMM_SHARE * gemm
    if mfu >= usual:
        return None
    lever = Lever(
        title="find what takes the rest",
        speedup=usual / mfu,
        basis="what well-set runs keep at least",
        action="record some steps with torch.profiler, then armillary diagnose TRACE",
    )
    evidence = Evidence(gauge="mfu", value=mfu, expected=usual, against="what runs on this chip usually keep")
    return Finding(
        loop="inner",
        cause="compute",
        rule="low_mfu",
        share=1 - mfu / usual,
        evidence=(evidence,),
        levers=(lever,),
        says=f"{mfu:.0%} MFU, where the chip's own GEMMs reach {gemm:.0%} of its "
        f"peak and runs usually keep {usual:.0%}",
    )


def _mfu_and_gemm(reading: Reading) -> tuple[float, float] | None:
    """(MFU, share of the peak that the chip's largest bf16 GEMMs reach); None where the chip is not known."""
    if reading.by == "armillary" or not (name := reading.settings.get("device")):
        return None
    memory = number(reading.settings.get("device_gib"))
    chip = chip_of(Gpu(name=name, vendor="", memory_bytes=memory * 2**30 if memory else None))
    try:
        known = curves(chip)
    except BadInput:
        return None
    values = reading.series("mfu") or [flops / known.peaks["bf16"] for flops in reading.series("flops_per_s")]
    return (median(values), known.sustained("bf16") / known.peaks["bf16"]) if values else None


RULES: tuple[Rule, ...] = (idle_stages, recompute_with_room, low_mfu)

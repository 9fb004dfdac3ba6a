"""Explanation of a training plan: every term with its formula and its numbers.

The values are the prediction's own terms; the formulas are those of docs/planning.md.
"""

import numpy as np

from armillary.planning.device_model.efficiency import width_of
from armillary.planning.training.explained_memory import memory_terms
from armillary.planning.training.explained_term import Term, seconds_term
from armillary.planning.training.fp8_fp4 import weights_s
from armillary.planning.training.layer_gemms import layer_gemms
from armillary.planning.training.layout_prediction import Prediction
from armillary.planning.training.offload import link_rate
from armillary.planning.training.step_overhead import (
    CALLS_PER_OPERATOR,
    CPU_STRAGGLER,
    GRAD_NORM_BYTES,
    STEP_S,
    kernel_launch_s,
)
from armillary.spec.arithmetic.non_gemm_ops import adamw
from armillary.spec.arithmetic.params import parameters
from armillary.units import bandwidth_text, bytes_text, count_text, flops_per_s_text, flops_text, seconds_text


def explain(prediction: Prediction) -> list[Term]:
    """Every term of the first layout of a prediction: work, time, memory."""
    return [
        *_work(prediction),
        *_gemms(prediction),
        *_compute(prediction),
        *_communication(prediction),
        *_rest(prediction),
        *memory_terms(prediction),
    ]


# --- work


def _work(prediction: Prediction) -> list[Term]:
    case, layout = prediction.case, prediction.layout()
    model, count = case.model, parameters(case.model)
    flops, m = prediction.model_flops, float(prediction.time.work.micro_batches[0])
    return [
        Term(
            name="model FLOPs per token",
            formula="6·N + 3·attention (causal as half)",
            numbers=f"6·{count_text(count.multiplied)} + {flops_text(flops - 6 * count.multiplied)}",
            value=flops,
            text=flops_text(flops),
        ),
        Term(
            name="micro-batches",
            formula="batch / (sequence · micro_batch · dp)",
            numbers=f"{case.batch_tokens:,} / ({case.sequence:,} · {layout.micro_batch} · {layout.dp})",
            value=m,
            text=f"{m:g}",
        ),
        Term(
            name="layers of the fullest stage",
            formula="layers / pp; ours split by FLOPs, the head included",
            numbers=f"{model.num_layers} / {layout.pp}",
            value=float(prediction.time.work.stages.fullest[0]),
            text=f"{float(prediction.time.work.stages.fullest[0]):g}",
        ),
    ]


def _gemms(prediction: Prediction) -> list[Term]:
    """The GEMMs of one layer of the commonest kind, for one micro-batch, as one device runs them."""
    terms = []
    for gemm in layer_gemms(prediction):
        shape = "·".join(f"{size:g}" for size in gemm.shape)
        numbers = f"2·{shape} = {flops_text(gemm.flops)} at {flops_per_s_text(gemm.flops_per_s)}"
        formula = "max(2·g·m·n·k / reached(m, n, k), bytes / bandwidth)"
        terms.append(seconds_term(f"  {gemm.name}, forward", formula, numbers, gemm.seconds))
    return terms


# --- time


def _compute(prediction: Prediction) -> list[Term]:
    time, case = prediction.time, prediction.case
    m, mean = float(time.work.micro_batches[0]), float(time.work.stages.mean[0])
    sustained, peak = case.curves.sustained(prediction.precision()), case.curves.peaks[prediction.precision()]
    hidden, width = float((time.comm - time.exposed)[0]), width_of(prediction.precision())
    return [
        seconds_term(
            "GEMMs",
            "micro-batches · layers · Σ (forward + dX + dW) + the ends",
            f"{m:g} · {mean:g} · GEMMs at up to {flops_per_s_text(sustained)} of {flops_per_s_text(peak)}",
            float(time.gemm[0]),
        ),
        seconds_term(
            "attention",
            "micro-batches · layers · FLOPs / reached(sequence, head dim)",
            f"{m:g} · {mean:g} · at up to {flops_per_s_text(case.curves.attention_forward[width])} forward, "
            f"{flops_per_s_text(case.curves.attention_backward[width])} backward",
            float(time.attention[0]),
        ),
        _memory_bound(prediction),
        seconds_term(
            "recompute",
            "micro-batches · layers · forward (full) or memory-bound operations (selective)",
            f"{prediction.layout().recompute}, one layer in {prediction.layout().recompute_every}",
            float(time.recompute[0]),
        ),
        seconds_term(
            "contention",
            "share of the chip · hidden communication",
            f"0.08 · {seconds_text(hidden)}",
            float(time.contention[0]),
        ),
    ]


_FORMULAS = {
    "tp": "micro-batches · layers · 4 · parts · tokens·hidden·2 bytes · (tp−1)/tp / rate",
    "cp": "micro-batches · layers · 3 · keys and values · (cp−1)/cp / rate",
    "ep": "micro-batches · layers · 4 · rows·hidden·2 bytes · (ep−1)/ep / rate",
    "gradients": "weights · bytes · (n−1)/n / (links · rate); twice for an all-reduce",
    "weights": "weights · bytes · (n−1)/n / (links · rate), once per step or twice per micro-batch",
    "pp": "2 · chunks · micro-batches · tokens·hidden·2 bytes / rate",
}


def _communication(prediction: Prediction) -> list[Term]:
    layout, terms = prediction.layout(), []
    sizes = {
        "tp": layout.tp,
        "cp": layout.cp,
        "ep": layout.ep,
        "gradients": layout.dp,
        "weights": layout.dp,
        "pp": layout.pp,
    }
    for name, cost in prediction.time.comm_costs.items():
        total, exposed = float(cost.total[0]), float(cost.exposed[0])
        if total > 0:
            hidden = seconds_text(max(total - exposed, 0.0))
            numbers = f"{_amount(prediction, name)} among {sizes[name]}: {seconds_text(total)} total, {hidden} hidden"
            terms.append(seconds_term(f"{name} exposed", _FORMULAS[name], numbers, exposed))
    return terms


def _amount(prediction: Prediction, name: str) -> str:
    """What a collective moves, and how often."""
    case, layout, time = prediction.case, prediction.layout(), prediction.time
    tokens = layout.micro_batch * case.sequence / layout.cp
    times = f"{float(time.work.micro_batches[0]):g} · {float(time.work.stages.mean[0]):g} ·"
    kv = 2 * case.model.kv_heads * case.model.head_dim / layout.tp
    rows = tokens / layout.tp * (case.model.moe.top_k if case.model.moe else 0)
    weights = float(time.work.parameters.total[0])
    return {
        "tp": f"{times} 8 · {bytes_text(tokens * case.model.hidden * 2)}",
        "cp": f"{times} 3 · {bytes_text(tokens * layout.cp * kv * 2)}",
        "ep": f"{times} 4 · {bytes_text(rows * case.model.hidden * 2)}",
        "gradients": f"{count_text(weights)} · {case.software.grad_bytes:g} B",
        "weights": f"{count_text(weights)} · 2 B",
        "pp": f"{2 * layout.interleave * float(time.work.micro_batches[0]):g} · "
        f"{bytes_text(tokens / (layout.tp if layout.sequence_parallel else 1) * case.model.hidden * 2)}",
    }[name]


def _memory_bound(prediction: Prediction) -> Term:
    """Memory-bound operations: fused kernels, or eager torch operators."""
    time, curves = prediction.time, prediction.case.curves
    times = f"{float(time.work.micro_batches[0]):g} · {float(time.work.stages.mean[0]):g}"
    if prediction.case.software.eager_layers:
        rate = curves.eager_bytes_per_s[width_of(prediction.precision())]
        return seconds_term(
            "memory-bound operations",
            "micro-batches · layers · bytes of torch operators / their rate",
            f"{times} · at {bandwidth_text(rate)}",
            float(time.memory[0]),
        )
    return seconds_term(
        "memory-bound operations",
        "micro-batches · layers · (bytes / bandwidth + kernel overhead)",
        f"{times} · at {bytes_text(curves.bytes_per_s)}/s",
        float(time.memory[0]),
    )


def _waits(prediction: Prediction) -> list[Term]:
    """Kernel launches and stragglers: of a device that its host runs ahead of, or of a CPU that does both."""
    time, layout, case = prediction.time, prediction.layout(), prediction.case
    m, mean = float(time.work.micro_batches[0]), seconds_text(float(time.work.mean_micro_batch_time[0]))
    kernels = float((time.work.layer.kernels_forward + time.work.layer.kernels_backward)[0] * time.work.stages.mean[0])
    launch, straggler = float(time.launch[0]), float(time.straggler[0])
    if case.software.eager_layers:
        call_s = case.curves.autograd_call_s * case.software.host
        return [
            seconds_term(
                "calls",
                "operators, recomputed ones and the ends included · calls per operator · seconds per call",
                f"{launch / call_s / CALLS_PER_OPERATOR:,.0f} · {CALLS_PER_OPERATOR:g} · {seconds_text(call_s)}",
                launch,
            ),
            seconds_term(
                "slowest rank",
                f"{CPU_STRAGGLER:g} · log2(ranks) · busy time",
                f"{CPU_STRAGGLER:g} · log2({layout.num_devices}) · {m:g} · {mean}",
                straggler,
            ),
        ]
    nodes = max(1.0, layout.num_devices / (case.cluster.node.num_chips if case.cluster.node else 1))
    return [
        seconds_term(
            "waiting for launches",
            "micro-batches · max(0, kernels · launch − device time)",
            f"{m:g} · max(0, {kernels:,.0f} · {seconds_text(kernel_launch_s(case))} − {mean})",
            launch,
        ),
        seconds_term(
            "slowest node", "0.008 · log2(nodes) · busy time", f"0.008 · log2({nodes:g}) · {m:g} · {mean}", straggler
        ),
    ]


def _rest(prediction: Prediction) -> list[Term]:
    time, layout = prediction.time, prediction.layout()
    case, curves = prediction.case, prediction.case.curves
    work, m = time.work, float(time.work.micro_batches[0])
    updated = case.lora.parameters / layout.pp if case.lora else float(work.parameters.total[0])
    slowest, mean = (seconds_text(float(s[0])) for s in (work.micro_batch_time, work.mean_micro_batch_time))
    shards = layout.shard_size * layout.cp if layout.zero and not case.lora else 1
    each = adamw("optimizer", 1, weight_dtype="bf16").bytes + GRAD_NORM_BYTES
    rounded = weights_s(case, prediction.layouts.take(np.array([0])), work.parameters)
    parts = [time.compute, time.exposed, time.bubble, time.overhead]
    return [
        seconds_term(
            "pipeline fill and drain",
            "(pp−1) · (forward + backward of a stage) / interleave",
            f"({layout.pp}−1) · {slowest} / {layout.interleave}",
            float(time.fill[0]),
        ),
        seconds_term(
            "uneven stages",
            "micro-batches · (slowest stage − mean)",
            f"{m:g} · ({slowest} − {mean})",
            float(time.imbalance[0]),
        ),
        seconds_term(
            "optimizer",
            "trained weights / shards · bytes / bandwidth + weights cast to fp8",
            f"{count_text(updated)} / {shards} · {each:g} B / {bandwidth_text(curves.bytes_per_s)}"
            f" + {seconds_text(float(rounded[0]))}",
            float(time.optimizer[0]),
        ),
        *_waits(prediction),
        seconds_term(
            "waiting for data",
            "max(0, tokens per rank / measured loader − busy time)",
            f"busy {m:g} · {mean}",
            float(time.data[0]),
        ),
        seconds_term("step, other", "reading, logging, a barrier", seconds_text(STEP_S), float(time.other[0])),
        seconds_term(
            "offload",
            "AdamW on the host − the next forward pass; copies − the passes that hide them",
            f"{layout.offload}, link {bandwidth_text(link_rate(case))}",
            float(time.offload[0]),
        ),
        seconds_term(
            "step",
            "compute + exposed communication + bubble + overhead",
            " + ".join(seconds_text(max(float(part[0]), 0.0)) for part in parts),
            float(time.total[0]),
        ),
    ]

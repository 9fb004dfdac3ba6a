"""Explain: every term of a training plan with its formula and the numbers put in.

The values are those of the prediction itself, term by term; the formulas are the ones of docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.efficiency import width_of
from armillary.planning.training.activations import in_flight, kept
from armillary.planning.training.compute import product_s
from armillary.planning.training.fp8_fp4 import precision_of, weights_s
from armillary.planning.training.memory_breakdown import FRAGMENTATION, context_bytes, memory
from armillary.planning.training.offload import link_rate
from armillary.planning.training.optimizer_states import state_bytes
from armillary.planning.training.peak_memory import MOMENTS, logit_bytes
from armillary.planning.training.prediction import Prediction
from armillary.planning.training.sharding import product
from armillary.planning.training.step_overhead import GRAD_NORM_BYTES, JITTER, RECORDED, STEP_S
from armillary.spec.arithmetic.layer_ops import adamw
from armillary.spec.arithmetic.params import parameters
from armillary.spec.arithmetic.workload import layer_pieces, make_batch
from armillary.units import bandwidth_text, bytes_text, count_text, flops_per_s_text, flops_text, seconds_text


@dataclass(frozen=True, kw_only=True)
class Term:
    """One line of the explanation."""

    name: str
    """what it is"""
    formula: str
    """in symbols"""
    numbers: str
    """the same with numbers"""
    value: float
    """the result, in seconds, bytes or as said"""
    text: str
    """the result with its unit"""


def explain(found: Prediction) -> list[Term]:
    """Every term of the first layout of a prediction: work, time, memory."""
    return [*_work(found), *_products(found), *_compute(found), *_exchanges(found), *_rest(found), *_memory(found)]


def _seconds(name: str, formula: str, numbers: str, value: float) -> Term:
    return Term(name=name, formula=formula, numbers=numbers, value=value, text=seconds_text(max(value, 0.0)))


def _bytes(name: str, formula: str, numbers: str, value: float) -> Term:
    return Term(name=name, formula=formula, numbers=numbers, value=value, text=bytes_text(value))


# --- work


def _work(found: Prediction) -> list[Term]:
    case, layout = found.case, found.layout()
    model, count = case.model, parameters(case.model)
    flops, m = found.model_flops, float(found.time.micro_batches[0])
    attention = flops - 6 * count.multiplied
    tokens = case.batch_tokens
    return [
        Term(
            name="model FLOPs a token",
            formula="6·N + 3·attention (causal as half)",
            numbers=f"6·{count_text(count.multiplied)} + {flops_text(attention)}",
            value=flops,
            text=flops_text(flops),
        ),
        Term(
            name="micro-batches",
            formula="batch / (sequence · micro_batch · dp)",
            numbers=f"{tokens:,} / ({case.sequence:,} · {layout.micro_batch} · {layout.dp})",
            value=m,
            text=f"{m:g}",
        ),
        Term(
            name="layers of the fullest stage",
            formula="layers / pp; ours cut by FLOPs, the head counted",
            numbers=f"{model.num_layers} / {layout.pp}",
            value=float(found.time.stages.fullest[0]),
            text=f"{float(found.time.stages.fullest[0]):g}",
        ),
    ]


def _products(found: Prediction) -> list[Term]:
    """The products of one layer of the commonest kind, one micro-batch, as one device runs them."""
    case, layouts = found.case, found.layouts.take(np.array([0]))
    kind = max(set(case.model.layers), key=case.model.layers.count)
    batch = make_batch([case.sequence] * int(layouts.micro_batch[0]), flash=case.flash)
    experts = case.model.moe.num_experts if case.model.moe else 0
    terms = []
    for piece in layer_pieces(case.model, kind, batch):
        op = piece.forward
        if op.kind != "matmul":
            continue
        mine = product(op, layouts, experts)
        precision = precision_of(case, op.name, layouts, mine)
        seconds = float(product_s(case, precision, mine.groups, mine.m, mine.n, mine.k)[0]) * case.software.gemm
        g, size_m, size_n, size_k = (float(x[0]) for x in (mine.groups, mine.m, mine.n, mine.k))
        rate = float(mine.flops[0]) / seconds
        work = flops_text(float(mine.flops[0]))
        numbers = f"2·{g:g}·{size_m:g}·{size_n:g}·{size_k:g} = {work} at {flops_per_s_text(rate)}"
        formula = "max(2·g·m·n·k / reached(m, n, k), bytes / bandwidth)"
        terms.append(_seconds(f"  {op.name}, forward", formula, numbers, seconds))
    return terms


# --- time


def _compute(found: Prediction) -> list[Term]:
    time, case = found.time, found.case
    m, mean = float(time.micro_batches[0]), float(time.stages.mean[0])
    reached = case.curves.lasting(found.precision())
    peak = case.curves.peaks[found.precision()]
    hidden, width = float((time.comm - time.exposed)[0]), width_of(found.precision())
    return [
        _seconds(
            "matrix products",
            "micro-batches · layers · Σ (forward + dX + dW) + the ends",
            f"{m:g} · {mean:g} · products at up to {flops_per_s_text(reached)} of {flops_per_s_text(peak)}",
            float(time.gemm[0]),
        ),
        _seconds(
            "attention",
            "micro-batches · layers · FLOPs / reached(sequence, head dim)",
            f"{m:g} · {mean:g} · at up to {flops_per_s_text(case.curves.attention_forward[width])} forward, "
            f"{flops_per_s_text(case.curves.attention_backward[width])} backward",
            float(time.attention[0]),
        ),
        _passes(found),
        _seconds(
            "recomputation",
            "micro-batches · layers · forward again (full) or what memory bounds (selective)",
            f"{found.layout().recompute}, one layer in {found.layout().recompute_every}",
            float(time.recompute[0]),
        ),
        _seconds(
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
    "weights": "weights · bytes · (n−1)/n / (links · rate), once a step or twice a micro-batch",
    "pp": "2 · chunks · micro-batches · tokens·hidden·2 bytes / rate",
}


def _exchanges(found: Prediction) -> list[Term]:
    layout, terms = found.layout(), []
    sizes = {
        "tp": layout.tp,
        "cp": layout.cp,
        "ep": layout.ep,
        "gradients": layout.dp,
        "weights": layout.dp,
        "pp": layout.pp,
    }
    for name, one in found.time.exchanges.items():
        total, exposed = float(one.total[0]), float(one.exposed[0])
        if total > 0:
            hidden = seconds_text(max(total - exposed, 0.0))
            numbers = f"{_amount(found, name)} among {sizes[name]}: {seconds_text(total)} in all, {hidden} hidden"
            terms.append(_seconds(f"{name} exposed", _FORMULAS[name], numbers, exposed))
    return terms


def _amount(found: Prediction, name: str) -> str:
    """What one exchange moves, and how often."""
    case, layout, time = found.case, found.layout(), found.time
    tokens = layout.micro_batch * case.sequence / layout.cp
    times = f"{float(time.micro_batches[0]):g} · {float(time.stages.mean[0]):g} ·"
    kv = 2 * case.model.kv_heads * case.model.head_dim / layout.tp
    rows = tokens / layout.tp * (case.model.moe.top_k if case.model.moe else 0)
    weights = float(time.held.total[0])
    sizes = {
        "tp": f"{times} 8 · {bytes_text(tokens * case.model.hidden * 2)}",
        "cp": f"{times} 3 · {bytes_text(tokens * layout.cp * kv * 2)}",
        "ep": f"{times} 4 · {bytes_text(rows * case.model.hidden * 2)}",
        "gradients": f"{count_text(weights)} · {case.software.grad_bytes:g} B",
        "weights": f"{count_text(weights)} · 2 B",
        "pp": f"{2 * layout.interleave * float(time.micro_batches[0]):g} · "
        f"{bytes_text(tokens / (layout.tp if layout.sequence_parallel else 1) * case.model.hidden * 2)}",
    }
    return sizes[name]


def _passes(found: Prediction) -> Term:
    """What memory bounds: fused passes, or torch's operators one by one."""
    time, curves = found.time, found.case.curves
    times = f"{float(time.micro_batches[0]):g} · {float(time.stages.mean[0]):g}"
    if found.case.software.plain_layers:
        rate = curves.plain_bytes_per_s[width_of(found.precision())]
        return _seconds(
            "memory-bound operations",
            "micro-batches · layers · bytes of torch's operators / their rate",
            f"{times} · at {bandwidth_text(rate)}",
            float(time.memory[0]),
        )
    return _seconds(
        "memory-bound operations",
        "micro-batches · layers · (bytes / bandwidth + a kernel's start)",
        f"{times} · at {bytes_text(curves.bytes_per_s)}/s",
        float(time.memory[0]),
    )


def _waits(found: Prediction) -> list[Term]:
    """Launches and the slowest: of a device that its host runs ahead of, or of a processor that does both."""
    time, layout, case = found.time, found.layout(), found.case
    m, mean = float(time.micro_batches[0]), seconds_text(float(time.mean_turn[0]))
    kernels = float((time.layer.kernels_forward + time.layer.kernels_backward)[0] * time.stages.mean[0])
    launch, straggle = float(time.launch[0]), float(time.straggle[0])
    if case.software.plain_layers:
        call_s = case.curves.call_s * case.software.host
        return [
            _seconds(
                "calls",
                "operators, those made again and the ends too · calls each · a call",
                f"{launch / call_s / RECORDED:,.0f} · {RECORDED:g} · {seconds_text(call_s)}",
                launch,
            ),
            _seconds(
                "slowest rank",
                f"{JITTER:g} · log2(ranks) · busy time",
                f"{JITTER:g} · log2({layout.num_devices}) · {m:g} · {mean}",
                straggle,
            ),
        ]
    nodes = max(1.0, layout.num_devices / (case.cluster.node.num_chips if case.cluster.node else 1))
    return [
        _seconds(
            "launches waited for",
            "micro-batches · max(0, kernels · launch − device time)",
            f"{m:g} · max(0, {kernels:,.0f} · {seconds_text(case.curves.launch_s)} − {mean})",
            launch,
        ),
        _seconds(
            "slowest node", "0.008 · log2(nodes) · busy time", f"0.008 · log2({nodes:g}) · {m:g} · {mean}", straggle
        ),
    ]


def _rest(found: Prediction) -> list[Term]:
    time, layout = found.time, found.layout()
    case, curves = found.case, found.case.curves
    m, mine = float(time.micro_batches[0]), float(time.held.total[0])
    updated = case.lora.parameters / layout.pp if case.lora else mine
    turn, mean = seconds_text(float(time.turn[0])), seconds_text(float(time.mean_turn[0]))
    sharers = layout.shard_size * layout.cp if layout.zero and not case.lora else 1
    each = adamw("optimizer", 1, weight_dtype="bf16").bytes + GRAD_NORM_BYTES
    rounded = weights_s(case, found.layouts.take(np.array([0])), time.held)
    parts = [time.compute, time.exposed, time.bubble, time.overhead]
    return [
        _seconds(
            "pipeline fill and drain",
            "(pp−1) · (forward + backward of a stage) / interleave",
            f"({layout.pp}−1) · {turn} / {layout.interleave}",
            float(time.fill[0]),
        ),
        _seconds(
            "uneven stages",
            "micro-batches · (slowest stage − mean)",
            f"{m:g} · ({turn} − {mean})",
            float(time.imbalance[0]),
        ),
        _seconds(
            "optimiser",
            "trained weights / sharers · bytes / bandwidth + weights rounded to fp8",
            f"{count_text(updated)} / {sharers} · {each:g} B / {bandwidth_text(curves.bytes_per_s)}"
            f" + {seconds_text(float(rounded[0]))}",
            float(time.optimizer[0]),
        ),
        *_waits(found),
        _seconds(
            "waiting for data",
            "max(0, tokens of a rank / measured loader − busy time)",
            f"busy {m:g} · {mean}",
            float(time.data[0]),
        ),
        _seconds("step, other", "reading, logging, a barrier", seconds_text(STEP_S), float(time.other[0])),
        _seconds(
            "offload",
            "the host's AdamW beside the next forward pass; copies − the passes they are beside",
            f"{layout.offload}, link {bandwidth_text(link_rate(case))}",
            float(time.offload[0]),
        ),
        _seconds(
            "step",
            "compute + exposed communication + bubble + overhead",
            " + ".join(seconds_text(max(float(part[0]), 0.0)) for part in parts),
            float(time.total[0]),
        ),
    ]


# --- memory


def _memory(found: Prediction) -> list[Term]:
    case, layouts, mine = found.case, found.layouts.take(np.array([0])), found.time.held
    states, held, each = state_bytes(case, layouts), memory(case, layouts), kept(case, layouts)
    total, shard = count_text(float(mine.total[0])), int(layouts.shard_size[0] * layouts.cp[0])
    zero, tokens = int(layouts.zero[0]), float(layouts.micro_batch[0] * case.sequence / layouts.cp[0])
    flying = float(in_flight(layouts, found.time.micro_batches[:1])[0])
    share = {stage: f" / {shard}" if zero >= stage else "" for stage in (1, 2, 3)}
    weight, trained, logit = float(states.weight[0]), total, float(logit_bytes(case, layouts)[0])
    if case.lora is not None:
        weight, trained = case.lora.base_bytes, count_text(case.lora.parameters / float((layouts.pp * layouts.tp)[0]))
    rows = [
        ("weights", "parameters · bytes (/ sharers with zero 3)", f"{total} · {weight:g}{share[3]}"),
        (
            "gradients",
            "trained parameters · bytes (/ sharers from zero 2), those that are there then",
            f"{trained} · {float(states.gradient[0]):g}{share[2]}",
        ),
        (
            "optimizer",
            "trained parameters · 8 (/ sharers from zero 1)",
            f"{trained} · {float(states.moments[0]):g}{share[1]}",
        ),
        (
            "master",
            "trained parameters · 4 below fp32 (/ sharers from zero 1)",
            f"{trained} · {float(states.master[0]):g}{share[1]}",
        ),
        (
            "activations",
            "tokens · (layers · micro-batches in flight · bytes a layer + working)",
            f"{tokens:g} · ({float(mine.layers[0]):g} · {flying:g} · up to {bytes_text(float(each.whole[0]))} + …)",
        ),
        (
            "loss",
            "tokens · vocabulary / tp · bytes a logit",
            f"{tokens:g} · {case.model.vocab:,} / {int(layouts.tp[0])} · {logit:g}, on the last stage",
        ),
        ("buffers", "two gathered layers and a gradient (zero 3), or two buckets", f"zero {zero}"),
        (
            "other",
            "context + fragmentation · the rest",
            f"{bytes_text(float(context_bytes(case, layouts)[0]))} + {FRAGMENTATION:g} · "
            f"{bytes_text(float(held.allocated[0]))}",
        ),
    ]
    terms = [_bytes(f"memory, {name}", formula, numbers, held.parts()[name]) for name, formula, numbers in rows]
    when = MOMENTS[int(held.moment[0])]
    return [*terms, _bytes("memory, all", f"Σ, most {when}", f"of {bytes_text(found.room)}", float(held.total[0]))]

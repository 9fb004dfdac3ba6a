"""Terms of a training plan's memory, by kind of state, with their numbers."""

import numpy as np

from armillary.planning.training.activations import activation_bytes, micro_batches_in_flight
from armillary.planning.training.explained_term import Term, bytes_term
from armillary.planning.training.layout_prediction import Prediction
from armillary.planning.training.memory_breakdown import FRAGMENTATION, context_bytes, memory
from armillary.planning.training.optimizer_states import state_bytes
from armillary.planning.training.peak_memory import SNAPSHOTS, logit_bytes
from armillary.units import bytes_text, count_text


def memory_terms(prediction: Prediction) -> list[Term]:
    """Every kind of state at the peak, and their sum."""
    case, layouts, params = prediction.case, prediction.layouts.take(np.array([0])), prediction.time.work.parameters
    states, usage, each = state_bytes(case, layouts), memory(case, layouts), activation_bytes(case, layouts)
    total, shard = count_text(float(params.total[0])), int(layouts.shard_size[0] * layouts.cp[0])
    zero, tokens = int(layouts.zero[0]), float(layouts.micro_batch[0] * case.sequence / layouts.cp[0])
    in_flight = float(micro_batches_in_flight(layouts, prediction.time.work.micro_batches[:1])[0])
    share = {stage: f" / {shard}" if zero >= stage else "" for stage in (1, 2, 3)}
    weight, trained, logit = float(states.weight[0]), total, float(logit_bytes(case, layouts)[0])
    if case.lora is not None:
        weight, trained = case.lora.base_bytes, count_text(case.lora.parameters / float((layouts.pp * layouts.tp)[0]))
    rows = [
        ("weights", "parameters · bytes (/ shards with ZeRO 3)", f"{total} · {weight:g}{share[3]}"),
        (
            "gradients",
            "trained parameters · bytes (/ shards from ZeRO 2), those allocated at the peak",
            f"{trained} · {float(states.gradient[0]):g}{share[2]}",
        ),
        (
            "optimizer",
            "trained parameters · 8 (/ shards from ZeRO 1)",
            f"{trained} · {float(states.optimizer[0]):g}{share[1]}",
        ),
        (
            "master",
            "trained parameters · 4 below fp32 (/ shards from ZeRO 1)",
            f"{trained} · {float(states.master[0]):g}{share[1]}",
        ),
        (
            "activations",
            "tokens · (layers · micro-batches in flight · bytes per layer + gradients)",
            f"{tokens:g} · ({float(params.layers[0]):g} · {in_flight:g} · "
            f"up to {bytes_text(float(each.no_recompute[0]))} + …)",
        ),
        (
            "loss",
            "tokens · vocabulary / tp · bytes per logit",
            f"{tokens:g} · {case.model.vocab:,} / {int(layouts.tp[0])} · {logit:g}, on the last stage",
        ),
        ("buffers", "two all-gathered layers and a gradient (ZeRO 3), or two buckets", f"ZeRO {zero}"),
        (
            "other",
            "context + fragmentation · the rest",
            f"{bytes_text(float(context_bytes(case, layouts)[0]))} + {FRAGMENTATION:g} · "
            f"{bytes_text(float(usage.allocated[0]))}",
        ),
    ]
    formula = f"Σ, most {SNAPSHOTS[int(usage.peak_at[0])]}"
    return [
        *(bytes_term(f"memory, {name}", formula, numbers, usage.parts()[name]) for name, formula, numbers in rows),
        bytes_term("memory, all", formula, f"of {bytes_text(prediction.memory_limit)}", float(usage.total[0])),
    ]

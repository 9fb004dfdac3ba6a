"""A row of measured training runs as a case and a layout; stated rules fill in what it leaves out.

Rules: no micro_batch means 1; no interleave means 1 where a step has many micro-batches per stage, else what keeps the
bubble small; no recompute is selective for experts, else the least with which a run that reports a speed fits its
device, else none; an unknown ZeRO stage 1; all releases of a framework are one framework. What else was plausible is
kept beside each rule, so that its effect can be priced.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from armillary.errors import BadInput
from armillary.planning.device_model.frameworks import Software, declared
from armillary.planning.device_model.vectorised_layouts import RECOMPUTES, SCHEDULES, Layouts, as_arrays
from armillary.planning.published.names import stand_in
from armillary.planning.published.row_case import Row, cluster_of, integer, model_of, number, second_token_layers
from armillary.planning.training.memory_breakdown import memory
from armillary.planning.training.train_case import NF4, Lora, TrainCase, lora_weights
from armillary.spec.arithmetic.params import parameters
from armillary.spec.layout import Layout, Recompute
from armillary.spec.model import ModelConfig

_PRECISIONS = (
    ("nvfp4", "nvfp4"),
    ("mxfp8", "mxfp8"),
    ("fp8-mx", "mxfp8"),
    ("mx ", "mxfp8"),
    ("fp8", "fp8"),
    ("float8", "fp8"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("tf32", "tf32"),
    ("fp32", "fp32"),
)
_ZERO = (
    ("full_shard", 3),
    ("shard_grad_op", 2),
    ("zero-3", 3),
    ("zero-2", 2),
    ("zero-1", 1),
    ("zero-0", 0),
    ("hsdp", 3),
    ("fsdp", 3),
    ("distributed optimizer", 1),
    ("zero", 1),
)


CORES = (1, 2, 4, 8)
"""devices per chip as tables count them (Neuron, TPU)"""
HSDP_GROUP = 8
"""ranks per shard group where a row says only HSDP: a node; 'ZeRO-1 in groups of 4' states another"""
MANY_MICRO_BATCHES = 4
"""micro-batches per pipeline stage from which nobody needs an interleaved schedule: the bubble is below a fifth"""
SMALL_BUBBLE = 0.1
"""bubble that an interleaved schedule is chosen for, as a share of the step"""


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One measured configuration, ready to be priced; its layout is an array of length one."""

    row: Row
    case: TrainCase
    layouts: Layouts
    chips: int
    """devices by the row's count"""
    assumed: tuple[str, ...]
    alternatives: Mapping[str, Layouts]
    """what else was plausible where the row states nothing -> the layout with it"""


def training_row(row: Row, software: Software) -> TrainingRow:
    """Read a row; BadInput says why one cannot be predicted."""
    model = model_of(row)
    layout, precision, assumed = _layout(row, model)
    layout, interleaved = _with_interleave(row, layout, model, software)
    assumed = (*assumed, *interleaved, *filter(None, [stand_in(row.get("gpu") or "")]))
    cluster = cluster_of(row, layout.num_devices)
    sequence, batch = number(row, "seq_len"), number(row, "global_batch")
    if not sequence or not (batch or number(row, "micro_batch")):
        raise BadInput("no sequence length, or neither global batch nor micro-batch")
    batch = batch or layout.micro_batch * layout.dp
    if layout.micro_batch * layout.dp > batch:
        raise BadInput(f"micro_batch × dp = {layout.micro_batch * layout.dp} exceed the global batch of {batch:g}")
    flash = "standard" not in (row.get("attention") or "").lower()
    if second := second_token_layers(row):
        model = replace(model, layers=(*model.layers, *model.layers[-1:] * second))
    case = TrainCase(
        model=model,
        cluster=cluster,
        sequence=int(sequence),
        batch_tokens=int(sequence * batch),
        software=_settings(row, software),
        extra_heads=second,
        flash=flash,
        lora=lora_of(row, model, software.adapters),
        pure="true" in (row.get("precision") or "").lower(),
    )
    layouts = as_arrays([layout], precision)
    if not (row.get("recompute") or "").strip() and not model.num_moe_layers and measurement(row):
        layouts, assumption = _least_recompute(case, layouts)
        assumed = (*assumed, assumption)
    return TrainingRow(
        row=row,
        case=case,
        layouts=layouts,
        chips=int(number(row, "n_gpus") or layout.num_devices),
        assumed=assumed,
        alternatives=_alternatives(row, model, layouts),
    )


def _with_interleave(
    row: Row, layout: Layout, model: ModelConfig, software: Software
) -> tuple[Layout, tuple[str, ...]]:
    """The stated interleave; else the least, of those that divide a stage's layers, with which the bubble
    (pp − 1)/(m·v) of m micro-batches is small."""
    batch = number(row, "global_batch") or layout.micro_batch * layout.dp
    micro_batches = max(batch / (layout.dp * layout.micro_batch), 1.0)
    if number(row, "vpp") or layout.pp == 1 or not software.interleaves:
        return layout, ()
    if micro_batches >= MANY_MICRO_BATCHES * layout.pp:
        return layout, ("vpp taken as 1",)
    layers = max(1, model.num_layers // layout.pp)
    choices = [chunks for chunks in range(1, layers + 1) if layers % chunks == 0]
    small = (chunks for chunks in choices if (layout.pp - 1) / (micro_batches * chunks) <= SMALL_BUBBLE)
    best = next(small, choices[-1])
    if best == 1:
        return layout, ("vpp taken as 1",)
    text = f"vpp taken as {best}: {micro_batches:g} micro-batches on {layout.pp} stages"
    return replace(layout, interleave=best, schedule="interleaved"), (text,)


def _alternatives(row: Row, model: ModelConfig, layouts: Layouts) -> dict[str, Layouts]:
    """Another plausible value of each setting that the row leaves open and a step depends on."""
    plausible = {}
    if int(layouts.pp[0]) > 1 and not number(row, "vpp"):
        layers = max(2, model.num_layers // int(layouts.pp[0]))
        other = 1 if int(layouts.interleave[0]) > 1 else next(n for n in range(2, layers + 1) if layers % n == 0)
        schedule = SCHEDULES.index("interleaved" if other > 1 else "1f1b")
        plausible[f"vpp={other}"] = replace(
            layouts, interleave=layouts.interleave * 0 + other, schedule=layouts.schedule * 0 + schedule
        )
    if not (row.get("recompute") or "").strip():
        name = "none" if RECOMPUTES[int(layouts.recompute[0])] == "selective" else "selective"
        plausible[f"recompute={name}"] = replace(layouts, recompute=layouts.recompute * 0 + RECOMPUTES.index(name))
    return plausible


def _least_recompute(case: TrainCase, layouts: Layouts) -> tuple[Layouts, str]:
    """The least recompute with which the row fits its device; none where nothing helps."""
    limit = case.cluster.chip.memory_bytes or float("inf")
    for code, name in enumerate(RECOMPUTES):
        tried = replace(layouts, recompute=layouts.recompute * 0 + code)
        if memory(case, tried).total[0] <= limit:
            return tried, f"recompute taken as {name} (the least that fits)"
    return layouts, "recompute taken as none"


def lora_of(row: Row, model: ModelConfig, adapters: str = "attention") -> Lora | None:
    """Adapters of a fine-tuning row: as many parameters as its note states, else rank 8 on queries and values; an
    nf4 base where precision or model name says so."""
    text = f"{row.get('model')} {row.get('precision')}".lower()
    if (row.get("kind") or "") != "lora" and "lora" not in text:
        return None
    stated = re.search(r"trainable params ([\d,]+)", row.get("note") or "")
    count = int(stated.group(1).replace(",", "")) if stated else lora_weights(model, 8)
    base = NF4_DOUBLE if "nf4-dq" in text else NF4 if "nf4" in text else 2.0
    return Lora(parameters=count, base_bytes=base, on=frozenset({"qkv"}) if adapters == "attention" else None)


NF4_DOUBLE = 0.5 + 1 / 64 + 4 / (64 * 256)
"""bytes per nf4 weight with quantised scales of one byte"""


def _settings(row: Row, software: Software) -> Software:
    """What the row states about its software: attention kernel, ZeRO-3 implementation, compiled or not, async tp."""
    attention, zero = (row.get("attention") or "").lower(), (row.get("zero_or_fsdp") or "").lower()
    text = " ".join(row.get(name) or "" for name in ("model", "precision", "note", "source")).lower()
    drops = "tokendrop" in (row.get("model") or "").lower()  # fixed capacity: no shape synchronises with the host
    own = not attention or _OWN_ATTENTION.search(attention) is not None
    torch_like = software.name not in declared() and _SHARDED.search(zero) is not None
    core = software.name == "Megatron-LM" and "standard" not in attention  # since Megatron-Core both are overlapped
    return replace(
        software,
        attention_kernel="attention" if own else "flash_2",
        flat_gathers=zero.startswith("zero-3"),
        static_shapes=software.static_shapes or drops,
        fused_layers=software.fused_layers or _COMPILED.search(text) is not None,
        tp_overlap=software.tp_overlap or core or _ASYNC_TP.search(text) is not None,
        dp_overlap=software.dp_overlap or core,
        stops_early=software.stops_early or torch_like,
    )


_SHARDED = re.compile(r"fsdp|full_shard|shard_grad_op")
"""torch's sharding, whose guides checkpoint without re-entrant autograd, or XLA's, which drops what nothing reads"""
_OWN_ATTENTION = re.compile(r"\bte\b|cudnn|flash-?(attention-?)?3|pallas|splash")
_COMPILED = re.compile(r"(?<!no )(?<!without )\bcompile")
_BY_ROW = re.compile(r"row-?wise|per[- ]row")
_ASYNC_TP = re.compile(r"async[ -]?tp")


def _layout(row: Row, model: ModelConfig) -> tuple[Layout, str, tuple[str, ...]]:
    sizes: dict[str, Any] = {name: integer(row, name) or 1 for name in ("tp", "pp", "cp", "ep")}
    dp, assumed = _replicas(row, sizes["tp"] * sizes["pp"] * sizes["cp"])
    if sizes["tp"] > model.heads or sizes["pp"] > model.num_layers + 2:
        raise BadInput(f"tp={sizes['tp']} × pp={sizes['pp']} exceed {model.heads} heads or {model.num_layers} layers")
    assumed += [] if number(row, "micro_batch") else ["micro_batch taken as 1"]
    recompute, stride, note = _recompute(row, model)
    sharding = (row.get("zero_or_fsdp") or "").lower()
    stated = re.search(r"groups? of (\d+)", sharding)
    group = int(stated.group(1)) if stated else HSDP_GROUP
    inside = ("hsdp" in sharding or stated) and dp > group > 0 and dp % group == 0
    interleave = (integer(row, "vpp") or 1) if sizes["pp"] > 1 else 1
    layout = Layout(
        **sizes,
        dp=dp,
        zero=next((stage for part, stage in _ZERO if part in sharding), 0),  # type: ignore[misc]
        shard=group if inside else None,
        interleave=interleave,
        schedule="interleaved" if interleave > 1 else "1f1b",
        micro_batch=integer(row, "micro_batch") or 1,
        recompute=recompute,
        recompute_every=stride,
        sequence_parallel="tensor parallel only" not in (row.get("note") or ""),
        fp8_scaling="row" if _BY_ROW.search((row.get("precision") or "").lower()) else "token",
    )
    return layout, stated_precision(row.get("precision") or "bf16"), (*assumed, *note)


def _replicas(row: Row, inner: int) -> tuple[int, list[str]]:
    """(dp, assumptions): as stated, unless it contradicts the number of devices, which then has priority; a device may
    count as several where a chip has several cores."""
    stated, devices = integer(row, "dp"), integer(row, "n_gpus")
    if stated and (not devices or stated * inner in [cores * devices for cores in CORES]):
        return stated, []
    if not devices:
        raise BadInput("no dp and no number of devices")
    if devices % inner:
        raise BadInput(f"{devices} devices are not a multiple of tp × pp × cp = {inner}")
    return devices // inner, [f"dp taken as {devices // inner}, which fills the devices"]


def _recompute(row: Row, model: ModelConfig) -> tuple[Recompute, int, tuple[str, ...]]:
    """(what is recomputed, in one layer of how many, assumptions); every second matmul is half of a layer's work."""
    text = (row.get("recompute") or "").strip().lower()
    if text in ("none", "selective", "full"):
        return text, 1, ()  # type: ignore[return-value]
    if "every second" in text:
        return "full", 2, ()
    if text:
        return ("full" if "full" in text else "selective"), 1, (f"recompute '{text}' read by its first word",)
    if model.num_moe_layers:
        return "selective", 1, ("recompute taken as selective (experts)",)
    return "none", 1, ()


def stated_precision(text: str) -> str:
    precision = next((name for part, name in _PRECISIONS if part in text.lower()), None)
    if precision is None:
        raise BadInput(f"precision '{text}' is not known")
    return precision


# --- measurements


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The published figure of a row."""

    name: str
    """tokens_per_s_per_gpu, step_s, tflops_per_gpu or mfu_pct"""
    value: float


def measurement(row: Row) -> Measurement | None:
    """Tokens/s, else seconds per step, else TFLOP/s or MFU by the stated convention."""
    for name, column in _MEASURED.items():
        value = number(row, column)
        if value:
            return Measurement(name=name, value=value)
    return None


_MEASURED: Mapping[str, str] = {
    "tokens_per_s_per_gpu": "measured_tokens_per_s_per_gpu",
    "step_s": "measured_step_s",
    "tflops_per_gpu": "measured_tflops_per_gpu",
    "mfu_pct": "measured_mfu_pct",
}


def predicted(row: TrainingRow, name: str, step_s: float) -> float:
    """The figure of a predicted step."""
    per_chip = row.case.batch_tokens / row.chips
    if name == "step_s":
        return step_s
    if name == "tokens_per_s_per_gpu":
        return per_chip / step_s
    rate = published_flops_per_token(row) * per_chip / step_s
    if name == "mfu_pct":  # published against the 16-bit peak, whatever the dtype of the GEMMs
        return 100 * rate / row.case.curves.peaks["bf16"]
    return rate / 1e12


def published_flops_per_token(row: TrainingRow) -> float:
    """FLOPs per token as the row's source counts them: 6·N with full or causal attention, or the hardware's with
    recompute (8 per weight of a layer, 16·layers·hidden·sequence: Narayanan et al., arXiv 2104.04473, section 5.1)."""
    model, sequence = row.case.model, row.case.sequence
    count = parameters(model).multiplied
    width = model.num_layers * model.heads * model.head_dim * sequence
    convention = (row.row.get("flop_convention") or "").lower()
    if "hardware" in convention:
        head = model.vocab * model.hidden
        return 8 * (count - head) + 6 * head + 16 * width
    return 6 * count + (12 if "full" in convention else 6) * width

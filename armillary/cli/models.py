"""`armillary models`: the catalogue as a table, or everything known about one model."""

from collections import Counter
from typing import Any

import click

from armillary.cli import completion
from armillary.cli.open_model import find_model
from armillary.cli.output import Output
from armillary.cli.verb_decorator import model_code_option, verb
from armillary.errors import BadModel
from armillary.model.supported_shapes import unbuildable
from armillary.spec import catalogue
from armillary.spec.arithmetic.ops import size_of
from armillary.spec.arithmetic.params import kv_bytes, kv_bytes_per_token, parameters, state_bytes
from armillary.spec.model import ModelConfig
from armillary.spec.toml.fields import to_plain
from armillary.store.hf_folder import gguf_file, stored_dtype, weight_files
from armillary.store.home import Home
from armillary.store.registry.model_facts import quantization
from armillary.store.resolve_model import ModelSource
from armillary.store.stored_weights import stored_weights
from armillary.units import bytes_text, count_text, flops_text

_BF16_BYTES = 2
_PARTS = ("embedding", "positions", "attention", "mlp", "router", "experts", "shared", "norms", "head")


@verb
@click.argument("name", required=False, shell_complete=completion.models)
@model_code_option
def models(out: Output, home: Home, name: str | None) -> None:
    """List the catalogue, or show one model.

    NAME is a catalogue name, a Hugging Face folder, a config.json, a Hub id (org/name[@revision]) or a run.
    """
    if name:
        _show_one(out, home, name)
    else:
        _show_all(out)


def _show_all(out: Output) -> None:
    entries = catalogue.models()
    columns = ["name", "params", "active", "layers", "hidden", "heads/kv", "context", "KV/token", "family"]
    out.table("", columns, [_row(entry.config) for entry in entries.values()])
    out.say(f"\n{len(entries)} models; armillary models NAME shows one")
    out.result([summary(entry.config) for entry in entries.values()], quiet=entries)


def summary(config: ModelConfig) -> dict[str, Any]:
    """One model in a few numbers."""
    count = parameters(config)
    return {
        "name": config.name,
        "family": config.family,
        "parameters": count.total,
        "active_parameters": count.active,
        "num_layers": config.num_layers,
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "context": config.context,
        "kv_bytes_per_token": kv_bytes_per_token(config),
        "buildable": unbuildable(config) is None,
    }


def _row(config: ModelConfig) -> list[object]:
    facts = summary(config)
    active = facts["active_parameters"]
    return [
        config.name,
        count_text(facts["parameters"]),
        count_text(active) if active != facts["parameters"] else None,
        config.num_layers,
        config.hidden,
        "latent" if config.mla else f"{config.heads}/{config.kv_heads}",
        config.context,
        bytes_text(facts["kv_bytes_per_token"]),
        config.family,
    ]


# --- one model


def _show_one(out: Output, home: Home, name: str) -> None:
    config, about = _find(out, home, name)
    count = parameters(config)
    out.fields(str(about.get("title") or config.name), _fields(config, about))
    rows = [(part, getattr(count, part)) for part in _PARTS if getattr(count, part)]
    out.say()
    shares = [(part, size, f"{100 * size / count.total:.1f} %") for part, size in [*rows, ("total", count.total)]]
    out.table("parameters", ["part", "count", "share"], shares)
    out.result(
        summary(config) | about | {"breakdown": to_plain(count), "config": config, "unbuildable": unbuildable(config)},
        quiet=str(count.total),
    )


def _find(out: Output, home: Home, name: str) -> tuple[ModelConfig, dict[str, Any]]:
    """The model and what is known about it; the catalogue knows more than a folder does."""
    source = find_model(out, home, name, need_weights=False)
    if source.origin != "catalogue":
        return source.config, {"source": f"{source.origin} {source.files or name}"} | _stored(source)
    entry = to_plain(catalogue.model(source.name))
    return source.config, {key: value for key, value in entry.items() if key != "config"}


def _stored(source: ModelSource) -> dict[str, Any]:
    """Bytes of the weight files, how they are quantized, and what the weights take in memory once loaded."""
    if source.folder is None or source.url:
        return {}
    try:
        files = weight_files(source.folder)
    except BadModel:  # some are missing, which only matters to those who load them
        return {}
    method = "gguf" if gguf_file(source.folder) else quantization(source.folder).get("quant_method", "")
    about = {"stored_bytes": sum(path.stat().st_size for path in files), "quantization": method}
    stored = stored_weights(source.folder)
    if stored is None:
        return about
    itemsize = size_of(stored_dtype(source.folder))
    return about | {"loaded_bytes": int(stored.loaded_bytes(itemsize)), "format": stored.format}


def _fields(config: ModelConfig, about: dict[str, Any]) -> list[tuple[str, object]]:
    count, reason = parameters(config), unbuildable(config)
    token_bytes, full_bytes = kv_bytes_per_token(config), kv_bytes(config, config.context)
    fields = [
        ("name", config.name),
        ("family", config.family),
        ("parameters", _counted(count.total)),
        ("active per token", _counted(count.active) if count.active != count.total else ""),
        ("published as", about.get("published_parameters")),
        *_shape_fields(config),
        ("weights in bf16", bytes_text(count.total * _BF16_BYTES)),
        ("weights as stored", _stored_text(about)),
        (
            "KV cache in bf16",
            f"{bytes_text(token_bytes)} per token, {bytes_text(full_bytes)} at {config.context:,} tokens",
        ),
        ("recurrent states", f"{bytes_text(state)} per sequence" if (state := state_bytes(config)) else ""),
        ("forward", f"{flops_text(2 * count.multiplied)} per token + attention"),
        ("the module", f"cannot build it: {reason}" if reason else "can build it"),
        ("hub", about.get("hub")),
        ("also called", about.get("aliases")),
        ("source", about.get("source")),
        ("note", about.get("note")),
    ]
    return [(name, value) for name, value in fields if value not in (None, "", [])]


def _stored_text(about: dict[str, Any]) -> str:
    if "stored_bytes" not in about:
        return ""
    method = about["quantization"]
    text = bytes_text(about["stored_bytes"]) + (f", {method}, packed in memory too" if method else "")
    return text + (f": {bytes_text(about['loaded_bytes'])}" if method and "loaded_bytes" in about else "")


def _shape_fields(config: ModelConfig) -> list[tuple[str, object]]:
    heads = f"{config.heads} heads of {config.head_dim}, {config.kv_heads} KV heads"
    if config.mla:
        heads = f"{config.heads} heads, latent of {config.mla.kv_rank} + {config.mla.rope_dim}"
    dense = config.num_moe_layers < config.num_layers
    kind = f"{config.activation}, gated" if config.gated else config.activation
    return [
        ("layers", _layers_text(config)),
        ("hidden", config.hidden),
        ("attention", heads),
        ("MLP", f"{config.ffn:,}, {kind}" if dense else ""),
        ("experts", _experts_text(config)),
        ("vocabulary", f"{config.vocab:,}{', tied' if config.tied else ''}"),
        ("context", config.context),
        ("positions", _positions_text(config)),
        ("norm", _norm_text(config)),
    ]


def _layers_text(config: ModelConfig) -> str:
    kinds = Counter(kind.attention for kind in config.layers)
    parts = [f"{count} {kind}" for kind, count in kinds.items() if len(kinds) > 1 or kind != "full"]
    if config.window:
        parts.append(f"window {config.window:,}")
    if 0 < config.num_moe_layers < config.num_layers:
        parts.append(f"{config.num_moe_layers} with experts")
    return f"{config.num_layers}" + (f": {', '.join(parts)}" if parts else "")


def _experts_text(config: ModelConfig) -> str:
    moe = config.moe
    if moe is None:
        return ""
    shared = f" + shared {moe.shared_ffn:,}" if moe.shared_ffn else ""
    return f"{moe.top_k} of {moe.num_experts} × {moe.ffn:,}{shared}"


def _positions_text(config: ModelConfig) -> str:
    if config.positions != "rope":
        return config.positions
    rope = config.rope
    stretch = f", {rope.scaling} × {rope.factor:g}" if rope.scaling != "none" else ""
    return f"rope, theta {rope.theta:,.0f}{stretch}"


def _counted(count: int) -> str:
    return f"{count:,} ({count_text(count)})"


def _norm_text(config: ModelConfig) -> str:
    where = "before and after" if config.norm_at == "both" else config.norm_at
    return f"{'RMSNorm' if config.norm == 'rms' else 'LayerNorm'} {where} the sub-layers"

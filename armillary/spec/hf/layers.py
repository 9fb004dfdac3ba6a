"""The layers of a Hugging Face config.json: which slide, which have experts, which have no rotary positions.

Files say it by `layer_types`, or by rules that differ between families.
"""

from collections.abc import Callable, Mapping
from typing import Any

from armillary.spec.model import refuse_too_deep

Raw = Mapping[str, Any]
Fields = dict[str, Any]
LAYER_TYPES = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "gated_delta",
    "simplicial_attention": "2-simplicial",
}
"""as `layer_types` names them -> as we do"""


def kinds(
    raw: Raw, *, sliding: Callable[[int], bool] | None = None, moe: Callable[[int], bool] | None = None
) -> list[Fields]:
    """One table per layer, from `layer_types` where the file has it, else from the given rules."""
    types = raw.get("layer_types")
    count = raw.get("num_hidden_layers") or raw.get("n_layer") or raw.get("n_layers") or 0
    refuse_too_deep(count)
    no_rope = raw.get("no_rope_layers") or [1] * count
    layers = []
    for i in range(count):
        attention = LAYER_TYPES.get(types[i], types[i]) if types else ("sliding" if sliding and sliding(i) else "full")
        layers.append({"attention": attention, "mlp": "moe" if moe and moe(i) else "dense", "rope": bool(no_rope[i])})
    return layers


def all_sliding(raw: Raw) -> Fields:
    """Mistral-style: one window for every layer, or none."""
    window = raw.get("sliding_window")
    return (
        {"window": window, "layers": kinds(raw, sliding=lambda i: bool(window))} if window else {"layers": kinds(raw)}
    )


def upper_sliding(raw: Raw, *, default_from: int = 28) -> Fields:
    """Qwen2-style: layers from `max_window_layers` on slide, when switched on."""
    on = raw.get("use_sliding_window", False) and raw.get("sliding_window")
    start = raw.get("max_window_layers", default_from)
    return with_window(kinds(raw, sliding=lambda i: bool(on) and i >= start), raw.get("sliding_window"))


def with_window(layers: list[Fields], window: int | None) -> Fields:
    """Layers, and the window only where some layer uses it."""
    used = any(layer["attention"] in ("sliding", "chunked") for layer in layers)
    return {"layers": layers, "window": window if used else None}

"""Shapes of long tensor lists, which torch's trace leaves out: an optimiser's are taken from the recording.

A list of more than thirty tensors is written as []. Where the recording says how many weights the optimisers step, such
a list is replaced by one tensor with that many elements (the mean, where there are several parameter groups).
"""

from collections.abc import Mapping
from typing import Any

KEY = "armillaryOptimizers"
"""what our recordings call the list of {"weights", "dtype"} beside the events"""
_FUSED_LISTS = {"adam": 4, "adamw": 4, "sgd": 3, "adagrad": 3, "lamb": 4}
"""weights, gradients and states of a fused optimiser; the step counts, one number per tensor, are left out"""


def fill_lists(
    name: str, dims: list[Any], types: list[Any], numbers: list[Any], about: Mapping[str, Any]
) -> tuple[list[Any], list[Any]]:
    """`dims` and `types` with the lists filled in, or unchanged."""
    base, lists = name.removeprefix("aten::"), about.get(KEY)
    if not lists or not base.startswith(("_foreach_", "_fused_")) or "TensorList" not in types:
        return dims, types
    if any(shape for shape, kind in zip(dims, types, strict=False) if kind == "TensorList"):
        return dims, _typed(types, lists)  # short enough to be written out
    if base == "_foreach_add_" and numbers[-1:] in (["1"], ["1."]):
        return dims, types  # the counts of steps
    weights = sum(int(entry["weights"]) for entry in lists) // len(lists)
    kind = f"TensorList {lists[0]['dtype']}"
    fused = _FUSED_LISTS.get(base.strip("_").removeprefix("fused_"))
    if fused:
        return [[[weights]]] * fused, [kind] * fused
    filled = [[[weights]] if each == "TensorList" else shape for shape, each in zip(dims, types, strict=False)]
    return filled, [kind if each == "TensorList" else each for each in types]


def _typed(types: list[Any], lists: list[Mapping[str, Any]]) -> list[Any]:
    """Lists with what they hold, where all weights have one type."""
    held = {entry["dtype"] for entry in lists}
    return [f"TensorList {lists[0]['dtype']}" if each == "TensorList" and len(held) == 1 else each for each in types]

"""Weights for a verb that needs them: loaded from where the model was found, or random on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from armillary.cli.find_model import find_model
from armillary.cli.output import Output
from armillary.errors import missing
from armillary.store.home import Home
from armillary.store.source import ModelSource

if TYPE_CHECKING:
    from armillary.model.transformer import Transformer


def open_model(
    out: Output, home: Home, text: str, *, random_weights: bool, seed: int = 0, dtype: str | None, device: str | None
) -> tuple[ModelSource, Transformer]:
    """(where it was found, the model on its device), with a bar while weights are read."""
    source = find_model(out, home, text, need_weights=not random_weights)
    need_torch("running a model")
    from armillary.model.device import pick_device
    from armillary.model.dtype import parse_dtype
    from armillary.model.transformer import build
    from armillary.model.weights import load_model

    where = pick_device(device)
    if random_weights:
        return source, build(source.config, dtype=parse_dtype(dtype or "fp32"), device=where, seed=seed)
    assert source.folder is not None
    with out.progress(f"loading {source.name}", unit="tensor") as bar:
        return source, load_model(source.folder, dtype=dtype, device=where, progress=bar.at)


def need_torch(needed_for: str) -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise missing("torch", needed_for, "torch") from None

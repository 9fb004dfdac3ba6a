"""Weights for a verb that needs them: loaded from where the model was found, or random on request."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from armillary.cli.output import Output
from armillary.cli.progress import Bar
from armillary.errors import missing
from armillary.store.home import Home
from armillary.store.resolve_model import ModelSource, resolve_model

if TYPE_CHECKING:
    from armillary.model.transformer import Transformer


def open_model(
    out: Output,
    home: Home,
    text: str,
    *,
    random_weights: bool,
    seed: int = 0,
    dtype: str | None,
    device: str | None,
    to_write: bool = False,
    packed: bool = False,
) -> tuple[ModelSource, Transformer]:
    """(where it was found, the model on its device), with a bar while weights are read; `to_write` refuses at once
    what could not be written again. Quantized weights stay `packed` for an engine, or are dequantised."""
    source = find_model(out, home, text, need_weights=not random_weights)
    need_torch("running a model")
    from armillary.model.weights.convert import open_weights, refuse_unwritable

    if to_write:
        refuse_unwritable(source)
    elif dtype is None and not random_weights:
        dtype = _dtype(out, home, source, device)
    with out.progress(f"loading {source.name}", unit="tensor") as bar:
        model = open_weights(
            source,
            random_weights=random_weights,
            seed=seed,
            dtype=dtype,
            device=device,
            progress=bar.at,
            packed=packed,
        )
    return source, model


def _dtype(out: Output, home: Home, source: ModelSource, device: str | None) -> str:
    """The dtype that a server would use on this device; reported where it is not the stored one."""
    from armillary.cli.serve_run_folder import resolve_dtype
    from armillary.spec.recipe import recipe_from_dict
    from armillary.store.hf_folder import stored_dtype

    resolved = resolve_dtype(home, source, recipe_from_dict({"model": {"name": source.name}}), device)
    if resolved.dtype != stored_dtype(source.folder):
        out.warn(f"dtype {resolved.reason}")
    return resolved.dtype


def need_torch(needed_for: str) -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise missing("torch", needed_for, "torch") from None


def find_model(out: Output, home: Home, text: str, *, need_weights: bool, trusted_keys: str = "") -> ModelSource:
    """`resolve_model`, showing the download if there is one."""
    with ExitStack() as stack:
        bars: list[Bar] = []

        def report(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(out.progress(f"fetching {text}", unit="B")))
            bars[0].at(done, total)

        return resolve_model(text, home, need_weights=need_weights, fetch_progress=report, trusted_keys=trusted_keys)


def pick_torch_device(device: str | None) -> Any:
    """The torch device to measure."""
    need_torch("measuring")
    from armillary.model.device import fit_threads, pick_device

    fit_threads()
    return pick_device(device)

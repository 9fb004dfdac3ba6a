"""Conversion of any named model to a Hugging Face folder with a given dtype and shard size."""

from pathlib import Path

from armillary.kernels.core.dtype import parse_dtype
from armillary.model.device import pick_device
from armillary.model.supported_shapes import refuse_unbuildable
from armillary.model.transformer import Progress, Transformer, build
from armillary.model.weights.hf_layout import rules
from armillary.model.weights.hf_weights import load_model, save_model
from armillary.spec.hf.config import to_hf
from armillary.store.home import Home
from armillary.store.resolve_model import ModelSource, resolve_model


def convert(
    model: Path | str,
    target: Path | str,
    *,
    home: Home | None = None,
    dtype: str | None = None,
    random_weights: bool = False,
    seed: int = 0,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> Path:
    """Write a folder, Hub id, run or release (or, with random weights, any catalogue name) to the folder `target`."""
    source = resolve_model(str(model), home or Home.default(), need_weights=not random_weights)
    refuse_unwritable(source)
    loaded = open_weights(source, random_weights=random_weights, seed=seed, dtype=dtype, device="cpu")
    return save_model(loaded, target, template=source.files, shard_bytes=shard_bytes, overwrite=overwrite)


def refuse_unwritable(source: ModelSource) -> None:
    """Checked before weights are created or read: what cannot be written need not be loaded."""
    refuse_unbuildable(source.config)
    to_hf(source.config)
    rules(source.config)


def open_weights(
    source: ModelSource,
    *,
    random_weights: bool = False,
    seed: int = 0,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    packed: bool = False,
) -> Transformer:
    """The model of a source on its device, with its own weights or random ones; quantized ones stay `packed` or are
    dequantised."""
    where = pick_device(device)
    if random_weights:
        return build(source.config, dtype=parse_dtype(dtype or "fp32"), device=where, seed=seed, progress=progress)
    assert source.folder is not None
    return load_model(source.folder, dtype=dtype, device=where, progress=progress, packed=packed)

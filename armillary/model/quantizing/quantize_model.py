"""A model quantized, written and measured: what `armillary quantize` does."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from armillary.errors import BadInput, BadModel
from armillary.kernels.core.dtype import parse_dtype
from armillary.model.evaluation.perplexity import Comparison
from armillary.model.evaluation.text_windows import TextWindows, text_windows
from armillary.model.quantized.quantization_config import packed_reader
from armillary.model.quantizing.block_stages import Stages
from armillary.model.quantizing.compressed_writer import write_compressed
from armillary.model.quantizing.gguf_writer import write_gguf
from armillary.model.quantizing.kv_calibration import KvCalibration
from armillary.model.quantizing.quantization_targets import find_target
from armillary.model.quantizing.quantized_stages import LayerError, QuantizedStages
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.transformer import Progress
from armillary.model.weights.convert import refuse_unwritable
from armillary.model.weights.hf_layout import rules
from armillary.model.weights.safetensors_folder import TensorFolder
from armillary.store.gguf.gguf_fields import tokenizer_fields
from armillary.store.gguf.gguf_tokenizer import WHOLE
from armillary.store.hf_folder import gguf_file, read_config, stored_dtype, weight_files
from armillary.store.resolve_model import ModelSource

WINDOW = 512  # tokens, or the model's context where that is shorter
_HELD_OUT = 4  # every fourth window is for measuring
_MEASURED = 16  # windows, where nothing is calibrated


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What became of a model."""

    path: Path
    bytes: int
    source_bytes: int
    errors: tuple[LayerError, ...]  # the worst first
    comparison: Comparison | None  # None for a model without a tokenizer
    text: str
    calibration_tokens: int
    measured_tokens: int
    notes: tuple[str, ...] = ()  # what a user should know


def quantize(
    source: ModelSource,
    target: Path,
    to: str,
    *,
    text: Path | None = None,
    keep: Sequence[str] = (),
    samples: int = 64,
    group: int = 128,
    kv: str = "",
    device: torch.device | str = "cpu",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Quantized:
    """Write `source` to the folder (for GGUF the file) `target`; `samples` windows of the text are calibrated on. `kv`
    adds scales for a KV cache in fp8 or int8."""
    if source.config.num_recurrent_layers or source.config.attention_gate:
        raise BadInput(f"the gated layers of {source.name} are not quantized here yet; serve it in bf16")
    if any(kind.attention == "2-simplicial" for kind in source.config.layers):
        raise BadInput(f"the 2-simplicial layers of {source.name} are not quantized here yet; serve it in bf16")
    folder = _plain_folder(source)
    wanted = find_target(to, parse_dtype(stored_dtype(folder)), group)
    if kv and wanted.spec.gguf:
        raise BadInput("GGUF files hold no scales of a KV cache; leave --kv out, or take another format")
    if kv and wanted.spec.pruned:
        raise BadInput("a 2:4 folder has floats alone, no scales of a KV cache; leave --kv out, or take another format")
    if kv and source.config.mla is not None:
        raise BadInput(f"{source.name} caches latents, which have no 8-bit scales yet; leave --kv out")
    _check_patterns(source, keep)
    calibration, held_out = _windows(source, text, samples if wanted.spec.calibrated or kv else 0)
    with TensorFolder(source.url or folder) as stored:
        stages = Stages(config=source.config, stored=stored, device=torch.device(device))
        stages.check()
        quantized = QuantizedStages(
            stages=stages,
            target=wanted,
            keep=tuple(keep),
            calibration=calibration,
            held_out=held_out,
            kv=KvCalibration(kind=kv) if kv else None,
            progress=progress,
        )
        write = write_gguf if wanted.spec.gguf else write_compressed
        size = write(quantized, folder, target, overwrite=overwrite)
        source_bytes = stored.total_bytes()
    return Quantized(
        path=target,
        bytes=size,
        source_bytes=source_bytes,
        errors=tuple(sorted(quantized.errors, key=lambda each: -each.error)),
        comparison=quantized.comparison,
        text=held_out.origin if held_out else "",
        calibration_tokens=calibration.tokens_WT.numel() if calibration else 0,
        measured_tokens=len(held_out) * held_out.predicted if held_out else 0,
        notes=_notes(source, quantized),
    )


def _plain_folder(source: ModelSource) -> Path:
    refuse_unwritable(source)
    if any(rule.transposed for rule in rules(source.config)):
        raise BadModel(f"{source.name}: experts stored in one tensor are not quantized here; serve it as it is")
    folder = source.folder
    assert folder is not None, "a source that was resolved with its weights"
    if gguf_file(folder) is not None or packed_reader(read_config(folder)) is not None:
        raise BadModel(f"{source.name} is quantized already; take the original, or armillary convert it first")
    weight_files(folder)
    return folder


def _check_patterns(source: ModelSource, keep: Sequence[str]) -> None:
    modules = [name.removesuffix(".weight") for rule in rules(source.config) for name in rule.hf_names]
    for pattern in keep:
        if not any(fnmatchcase(module, pattern) for module in modules):
            example = next(module for module in modules if module.endswith("o_proj"))
            raise BadInput(f"--keep {pattern} names no module; write it like '{example}' or '*.down_proj'")


def _windows(source: ModelSource, text: Path | None, samples: int) -> tuple[TextWindows | None, TextWindows | None]:
    """(to calibrate on, to measure on); a model without a tokenizer has neither."""
    files = source.files
    if files is None or not (files / "tokenizer.json").is_file():
        if samples or text is not None:
            raise BadInput(
                f"{source.name} has no tokenizer, so no text calibrates it; take int4-rtn, fp8 or int8, without --kv"
            )
        return None, None
    length = min(WINDOW, source.config.context)
    most = samples * _HELD_OUT // (_HELD_OUT - 1) if samples else _MEASURED
    windows = text_windows(Tokenizer.load(files), text, length=length, most=max(most, _HELD_OUT))
    if not samples:
        return None, windows
    if len(windows) < _HELD_OUT:
        raise BadInput(f"{windows.origin} has {len(windows)} windows of {length} tokens; give {_HELD_OUT} or more")
    return windows.split(_HELD_OUT)


def _notes(source: ModelSource, stages: QuantizedStages) -> tuple[str, ...]:
    notes = []
    if stages.comparison is None:
        notes.append(f"{source.name} has no tokenizer, so its perplexity was not measured")
    if stages.target.spec.gguf and source.files is not None:
        fields = tokenizer_fields(source.files, source.config.vocab)
        if WHOLE in fields:
            notes.append("llama.cpp has no name for how this tokenizer splits text: it loads the file without one")
    return tuple(notes)

"""Hugging Face folders in and out: config.json, safetensors (one file or several with an index), tokenizer files.

Tensors are fused at load and split at save; no pickle is ever read. A folder is written to a temporary place and moved
when it is complete.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.errors import BadInput, BadModel
from armillary.kernels.core.dtype import HF_NAMES, parse_dtype
from armillary.model.lora import NAMES as ADAPTERS
from armillary.model.quantized.quantization_config import packed_reader
from armillary.model.transformer import Progress, Transformer, build
from armillary.model.weights.gguf_weights import GgufTensors
from armillary.model.weights.hf_layout import SELECTION_BIAS, Rule, is_of_mtp_layer, rules
from armillary.model.weights.host_to_device import Sender
from armillary.model.weights.kv_ranges import SCALES, read_kv_ranges
from armillary.model.weights.packed_weights import WHOLE, Keep, PackedFolder, Shard, load_packed
from armillary.model.weights.safetensors_folder import StoredTensor, TensorFolder
from armillary.model.weights.safetensors_writer import copy_alongside, refuse_foreign, write_shards
from armillary.spec.hf.config import from_hf, to_hf
from armillary.spec.model import ModelConfig
from armillary.store.atomic import staged_folder
from armillary.store.gguf.local_folder import gguf_folder, is_gguf
from armillary.store.hf_folder import gguf_file, read_config
from armillary.store.remote import is_url
from armillary.store.remote_model import local_files

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Read = Callable[[str], Tensor]  # an unsharded parameter by our name


def load_model(
    folder: Path | str,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    packed: Keep = False,
    shard: Shard = WHOLE,
) -> Transformer:
    """The model of a Hugging Face folder, or of its address in a store; `dtype` None keeps the folder's own. Quantized
    weights stay `packed`, frozen, or are dequantised to the dtype. A GGUF file is a folder too. With a `shard`, for
    quantized folders, only a rank's part of each weight stays in memory."""
    if is_gguf(folder):
        folder = gguf_folder(Path(folder))
    folder = local_files(str(folder)) if is_url(str(folder)) else Path(folder)
    raw = read_config(folder)
    config = from_hf(raw, name=folder.name)
    wanted = parse_dtype(dtype) if dtype is not None else _named_dtype(raw)
    if (file := gguf_file(folder)) is not None:
        tensors = GgufTensors(file, config)
        contents = PackedFolder(config, tensors, tensors.read_module)
        dtype = wanted or torch.float16
        return load_packed(contents, dtype=dtype, device=device, keep=packed, progress=progress, shard=shard)
    read_module = packed_reader(raw)
    with TensorFolder(folder) as stored:
        if read_module is None or config.tied or stored.is_plain(HEAD):
            check_head(config, stored)
        if read_module is not None:
            contents = PackedFolder(config, stored, read_module)
            dtype = wanted or torch.bfloat16
            model = load_packed(contents, dtype=dtype, device=device, keep=packed, progress=progress, shard=shard)
        else:
            model = build(config, dtype=wanted or stored.dtype(), device=device)
            fill(model, stored, progress)
        read_kv_ranges(model, stored, raw)
    return model


def _named_dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that config.json names, in the old or the new spelling."""
    text = raw.get("dtype") or raw.get("torch_dtype")
    return next((dtype for dtype, name in HF_NAMES.items() if name == text), None)


def check_head(config: ModelConfig, stored: TensorFolder) -> None:
    """Check vocabulary rows and tied embeddings before anything is built."""
    check_vocabulary(config, stored)
    if has_tied_copy(config, stored) and not torch.equal(stored.read(EMBEDDING), stored.read(HEAD)):
        raise BadModel(tied_differs(config))


def check_vocabulary(config: ModelConfig, stored: TensorFolder) -> None:
    """Check the shapes of embedding and head, without reading them."""
    if EMBEDDING not in stored:
        return
    shape = stored.where(EMBEDDING).shape
    rows = shape[0] if shape else 0
    if rows != config.vocab:
        raise BadModel(
            f"{config.name}: the embedding has {rows} rows but config.json says vocab_size {config.vocab}; "
            f"set it to {rows}"
        )
    if not config.tied and HEAD not in stored:
        raise BadModel(
            f"{config.name}: config.json says untied but lm_head.weight is missing; set tie_word_embeddings to true"
        )
    if has_tied_copy(config, stored) and stored.where(HEAD)[2:] != stored.where(EMBEDDING)[2:]:
        raise BadModel(tied_differs(config))


def has_tied_copy(config: ModelConfig, stored: TensorFolder) -> bool:
    """Whether an embedding that is tied is stored a second time, as the head."""
    return config.tied and EMBEDDING in stored and HEAD in stored


def tied_differs(config: ModelConfig) -> str:
    return (
        f"{config.name}: config.json says tied but lm_head.weight differs from the embedding; set "
        "tie_word_embeddings to false"
    )


@torch.no_grad()
def fill(model: Transformer, stored: TensorFolder, progress: Progress | None = None) -> None:
    """Copy every stored tensor into an unsharded model, fused; for a GPU they are fused there. Shards are filled by
    `parallel.loading`."""
    parameters = full_names(model)
    mapped = [each for each in stored_parts(model, stored) if each[0].name in parameters]
    device = next(iter(parameters.values())).device
    with Sender(device) if device.type == "cuda" and not stored.url else nullcontext() as sender:
        read = ([stored.read(name) for name in rule.hf_names] for rule, _ in mapped)
        for i, parts in enumerate(read if sender is None else sender.send(places for _, places in mapped)):
            rule = mapped[i][0]
            parameters[rule.name].copy_(rule.join(parts))
            if progress:
                progress(i + 1, len(mapped))


def stored_parts(model: Transformer, stored: TensorFolder) -> list[tuple[Rule, list[StoredTensor]]]:
    """Every tensor of the complete model, and where its parts are stored. BadModel where some are missing, unknown, or
    make other shapes than the model (which may be one stage of it) has."""
    all_rules = [as_stored(rule, stored) for rule in rules(model.config)]
    _check_complete(model, all_rules, stored)
    parameters = full_names(model)
    for rule in all_rules:
        if rule.name in parameters:
            _check_shape(rule, stored, parameters[rule.name].shape, model.config.name)
    return [(rule, [stored.where(name) for name in rule.hf_names]) for rule in all_rules]


def full_names(model: Transformer) -> dict[str, Tensor]:
    """Everything that is stored of a model, by its names in the complete model: where a last stage holds a copy of the
    tied embedding, that is the embedding."""
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | selection_biases(model)
    if model.config.tied and model.embedding is None and model.output is not None:
        tensors["embedding.weight"] = tensors.pop("output.weight")
    return tensors


def selection_biases(model: Transformer) -> dict[str, Tensor]:
    """The biases that routers add to scores for the choice: buffers, because no gradient reaches them."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(SELECTION_BIAS)}


def _check_shape(rule: Rule, stored: TensorFolder, wanted: torch.Size, name: str) -> None:
    parts = [stored.where(hf_name) for hf_name in rule.hf_names]
    shape = rule.joined_shape([part.shape for part in parts])
    if shape != wanted:
        actual = list(shape) if shape is not None else [list(part.shape) for part in parts[:3]]
        raise BadModel(
            f"{name}: {rule.hf_names[0]} makes {actual} where config.json says {list(wanted)}; config.json and "
            "weights are not of one model"
        )


def as_stored(rule: Rule, stored: TensorFolder) -> Rule:
    """Experts may be stored stacked ([E, 2F, H] gates then ups; [E, H, F]) rather than one by one."""
    if len(rule.hf_names) < 2 or rule.hf_names[0] in stored or ".experts.0." not in rule.hf_names[0]:
        return rule
    prefix = rule.hf_names[0].split(".experts.0.")[0].replace("block_sparse_moe", "mlp")
    if rule.name.endswith("up_E2FH"):
        name, join = f"{prefix}.experts.gate_up_proj", _join_stacked_experts
    else:
        name, join = f"{prefix}.experts.down_proj", lambda parts: parts[0]
    return Rule(name=rule.name, hf_names=(name,), join=join, split=rule.split) if name in stored else rule


def _join_stacked_experts(parts: Any) -> Tensor:
    gate, up = parts[0].chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def _check_complete(model: Transformer, all_rules: list[Rule], stored: TensorFolder) -> None:
    name = model.config.name
    filled = {rule.name for rule in all_rules}
    lacking = [each for each in full_names(model) if each not in filled and not each.endswith(ADAPTERS)]
    assert not lacking, f"no rule fills {lacking[:3]}"
    wanted = {hf_name for rule in all_rules for hf_name in rule.hf_names}
    missing = sorted(wanted - set(stored.names()))
    if missing and any(each.endswith((".qweight", ".weight_packed")) for each in stored.names()):
        raise BadModel(f"{name} is quantized; write plain weights with armillary convert, or take one device")
    if missing:
        raise BadModel(
            f"{name}: {len(missing)} tensors are missing, the first {missing[0]}; config.json and weights are not of "
            "one model"
        )
    ignored = (*SCALES, "lm_head.weight", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
    extra = sorted(
        each
        for each in set(stored.names()) - wanted
        if not each.endswith(ignored) and not is_of_mtp_layer(each, model.config, stored.__contains__)
    )
    if extra:
        raise BadModel(
            f"{name}: {len(extra)} tensors are not part of a {model.config.family} model of this shape, the first "
            f"{extra[0]}; config.json and weights are not of one model"
        )


# --- saving


def save_model(
    model: Transformer,
    folder: Path | str,
    *,
    dtype: torch.dtype | str | None = None,
    template: Path | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Progress | None = None,
    read: Read | None = None,
) -> Path:
    """Write the model as a Hugging Face folder; tokenizer files and special-token ids are those of the folder
    `template`. `read` gives an unsharded parameter by name where the model holds only a part; it is called in the order
    of `hf_layout.rules`."""
    if shard_bytes < 1:
        raise BadInput(f"a weight file of at most {shard_bytes} bytes holds nothing; try --shard-size 5GB")
    raw = to_hf(model.config) | _token_ids(template)
    stored_dtype = parse_dtype(dtype) if dtype is not None else next(model.parameters()).dtype
    raw["torch_dtype"] = HF_NAMES[stored_dtype]
    refuse_foreign(Path(folder))
    with staged_folder(Path(folder), overwrite=overwrite) as staged:
        total = sum(len(rule.hf_names) for rule in rules(model.config))
        write_shards(_counted(hf_tensors(model, stored_dtype, read), total, progress), staged, shard_bytes)
        copy_alongside(template, staged)
        (staged / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    return Path(folder)


def _token_ids(template: Path | None) -> dict[str, Any]:
    """Always written: where they are missing, families fill in ids that may be outside the vocabulary."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    for name in ("config.json", "generation_config.json"):
        if template is not None and (template / name).exists():
            raw = json.loads((template / name).read_text())
            return {key: raw.get(key) for key in keys}
    return dict.fromkeys(keys)


def hf_tensors(model: Transformer, dtype: torch.dtype, read: Read | None = None) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of every weight, split."""
    read = read or (dict(model.named_parameters()) | selection_biases(model)).__getitem__
    for rule in rules(model.config):
        stored_dtype = torch.float32 if rule.name.endswith(SELECTION_BIAS) else dtype
        fused = read(rule.name).detach().to("cpu", stored_dtype)
        for name, part in zip(rule.hf_names, rule.split(fused), strict=True):
            yield name, part.contiguous()


def _counted(
    tensors: Iterator[tuple[str, Tensor]], total: int, progress: Progress | None
) -> Iterator[tuple[str, Tensor]]:
    for written, each in enumerate(tensors, start=1):
        yield each
        if progress:
            progress(written, total)

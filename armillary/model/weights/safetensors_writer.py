"""Model folders as they are written: safetensors files of a limited size with an index, and the files beside them."""

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from armillary.errors import BadInput

_ALONGSIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)


def copy_alongside(template: Path | None, folder: Path) -> None:
    """Tokenizer, generation and pooling files of the folder `template`."""
    for name in _ALONGSIDE if template else ():
        if template is not None and (template / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(template / name, folder / name)


def refuse_foreign(folder: Path) -> None:
    """Only a model folder, or an empty one, may be replaced: `--overwrite` never deletes anything else."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    small_files = "|".join(re.escape(name.partition("/")[0]) for name in _ALONGSIDE)
    written = re.compile(rf"config\.json|model[\w.-]*\.safetensors(\.index\.json)?|{small_files}")
    foreign = sorted(path.name for path in folder.iterdir() if not written.fullmatch(path.name))
    if foreign:
        raise BadInput(f"{folder} holds {foreign[0]}, which is no part of a model we write; choose another folder")


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, limit: int) -> int:
    """One file where it fits, else several and an index; each shard is written as soon as it is full. Returns the
    bytes of all tensors."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total_size = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > limit:
            shards.append(_write_shard(folder, len(shards), pending))
            pending, size = {}, 0
        pending[name] = tensor.clone() if tensor._base is not None else tensor
        size, total_size = size + tensor.nbytes, total_size + tensor.nbytes
    shards.append(_write_shard(folder, len(shards), pending))
    _name_shards(folder, shards, total_size)
    return total_size


def _write_shard(folder: Path, index: int, tensors: dict[str, Tensor]) -> list[str]:
    write_tensors(folder / f"part-{index}.safetensors", tensors)
    return list(tensors)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file; where the disk is at fault, an OSError says so."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code.group(1)), os.strerror(int(code.group(1))), str(path)) from error
    path.chmod(0o666 & ~_umask())  # the library writes files that only their owner can read


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _name_shards(folder: Path, shards: list[list[str]], total_size: int) -> None:
    if len(shards) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{i}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

"""A GGUF file as a model folder: config.json and tokenizer are written from its header, the weights stay in the file.

Everything that takes a Hugging Face folder takes this one; a file of it says where the weights are.
"""

import json
from hashlib import sha256
from pathlib import Path

from armillary.errors import BadModel
from armillary.store.atomic import write_text
from armillary.store.gguf.gguf_config import to_hf_config
from armillary.store.gguf.gguf_header import read_header
from armillary.store.gguf.gguf_tokenizer import tokenizer_files
from armillary.store.hf_folder import GGUF_MARKER
from armillary.store.home import Home

_WRITTEN = ("tokenizer.json", "tokenizer_config.json")


def is_gguf(path: Path | str) -> bool:
    return str(path).endswith(".gguf") and Path(path).is_file()


def gguf_folder(path: Path, home: Home | None = None) -> Path:
    """A local folder for the file, written anew at each call."""
    path = path.absolute()
    if "-of-" in path.stem and path.stem.rpartition("-of-")[2] not in ("", "00001"):
        raise BadModel(f"{path} is one of several files; join them with llama-gguf-split --merge")
    header = read_header(path)
    contents = {"config.json": to_hf_config(header)} | tokenizer_files(header)
    digest = sha256(str(path).encode()).hexdigest()[:12]
    folder = (home or Home.default()).cache / "gguf_models" / f"{path.stem}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in _WRITTEN:
        if name not in contents:
            (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        write_text(folder / name, json.dumps(content, ensure_ascii=False))
    write_text(folder / GGUF_MARKER, str(path))
    return folder

"""Names in published tables as catalogue models and chips: 'LLaMA 70B', 'meta-llama/Meta-Llama-3-8B', 'DGX-H100',
'8 x NVIDIA H100 80GB HBM3', 'A100-80GB (330W limit)', 'p5.48xlarge'.

Tables spell names in many ways. A name is reduced to letters, versions and sizes, and of several models the one whose
parameters are nearest to the row's is chosen; no model is better than a wrong one. A chip may be named by its maker,
its memory, the node or the instance it is in, and how many there are.
"""

import re

from armillary.spec import catalogue
from armillary.spec.arithmetic.params import parameters
from armillary.spec.hardware import Chip
from armillary.spec.model import ModelConfig

_FAR = 0.12
"""largest relative difference of parameters from the row's"""
_SUFFIXES = re.compile(
    r"[-_ ](instruct|chat|hf|base|it|fp8|fp4|nvfp4|mxfp4|bf16|fp16|int4|int8|awq|gptq|quantized|preview|\d{4}"
    r"|a\d+-?b?)$"
)
_PREFIXES = re.compile(r"^(meta|mistralai|google|microsoft|nvidia)-(?=llama|mistral|mixtral|gemma|phi|deepseek)")
_MAKERS = re.compile(
    r"^(nvidia|amd|instinct|intel|habana|google|cloud|aws|amazon|geforce|quadro|tesla|dgx|hgx|azure|gcp|standard)-"
)
_COUNT = re.compile(r"^\d{1,5}-?[x×]-?|-?[x×]-?\d{1,5}$|^\d{1,5}-(?=[a-z])")
_STAND_INS = {"a800": "a100-80gb-sxm", "mi350x": "mi355x"}
"""chips that differ from one of the catalogue in links or clock only: A800 has 400 GB/s of NVLink rather than 600,
MI350X is the air-cooled MI355X, at 0.92 of its peak"""
_SIZE = re.compile(r"(?:^|-)((?:\d+x)?\d+(?:\.\d+)?)(b|m|t)(?=-|$)")


def find_model(text: str, params_b: float | None = None) -> ModelConfig | None:
    """The catalogue model that `text` names, or None; `params_b` billions decide between several."""
    name = _plain(text)
    for candidate in _shortened(name):
        exact = _catalogued(candidate)
        if exact is not None and _near(exact, params_b):
            return exact
    known = (entry.config for entry in catalogue.models().values())
    alike = [config for config in known if _alike(config.name, name) and _near(config, params_b)]
    return min(alike, key=lambda config: _distance(config, params_b), default=None)


def find_chip(text: str) -> Chip | None:
    """The chip that `text` names: all of it, without the part in brackets, that part, or its first words; each also
    without makers and numbers of chips."""
    text = text.replace("/", "-")
    inside = re.findall(r"\(([^)]*)\)", text)
    outside = re.sub(r"\([^)]*\)", "", text)
    if any("gcd" in part.lower() for part in inside):
        inside.insert(0, f"{outside.strip()}-gcd")
    tries = [text, *inside, outside] if inside and "gcd" in inside[0].lower() else [text, outside, *inside]
    words = [_plain(part) for part in tries]
    words += [_bare(word) for word in words]
    words += [re.sub(r"-\d+gb", "", word) for word in words if "pcie" in word]
    words += ["-".join(word.split("-")[:size]) for word in words for size in range(word.count("-"), 0, -1)]
    return next((chip for word in words if (chip := _chip(word)) is not None), None)


def stand_in(text: str) -> str:
    """'A800-80GB taken as a100-80gb-sxm' where the catalogue has another chip in its place, else nothing."""
    word = _bare(_plain(text)).split("-")[0]
    return f"{text} taken as {_STAND_INS[word]}" if word in _STAND_INS else ""


def _bare(name: str) -> str:
    """'8-x-nvidia-h100-80gb-hbm3' -> 'h100-80gb-hbm3'."""
    while (shorter := _MAKERS.sub("", _COUNT.sub("", name))) not in (name, ""):
        name = shorter
    return name


# --- names


def _plain(text: str) -> str:
    """'meta-llama/Llama-v3.1 8B_Instruct' -> 'llama-3.1-8b-instruct'."""
    name = _PREFIXES.sub("", text.strip().lower().rpartition("/")[2])
    name = re.sub(r"[\s_]+", "-", name)
    return re.sub(r"(llama|qwen|mistral|gemma|phi|falcon)-?v(?=\d)", r"\1-", name).strip("-")


def _shortened(name: str) -> list[str]:
    """The name, and what is left as suffixes are removed one by one; 'llama3' is also 'llama-3'."""
    names = [name]
    while (shorter := _SUFFIXES.sub("", names[-1])) != names[-1]:
        names.append(shorter)
    names += [re.sub(r"-(instruct|chat|base)(?=-)", "", part) for part in names]
    hyphenated = [re.sub(r"^(llama|gemma|phi)(?=\d)", r"\1-", part) for part in names]
    joined = [re.sub(r"^(qwen)-(?=\d)", r"\1", part) for part in names]
    return list(dict.fromkeys([*names, *hyphenated, *joined]))


def _alike(known: str, name: str) -> bool:
    """Same family, a common size, and no contradicting version."""
    if not set(_SIZE.findall(known)) & set(_SIZE.findall(name)):
        return False
    families = [re.split(r"[-\d.]", part)[0] for part in (known, name)]
    version = re.match(r"[a-z]+-?(\d+(?:\.\d+)?)(?![\dbmx.])", _SIZE.sub("", name))
    stated = version.group(1) if version else ""
    return families[0] == families[1] and (not stated or stated in known)


def _catalogued(name: str) -> ModelConfig | None:
    return catalogue.model(name).config if catalogue.has_model(name) else None


def _near(config: ModelConfig, params_b: float | None) -> bool:
    return params_b is None or _distance(config, params_b) <= _FAR


def _distance(config: ModelConfig, params_b: float | None) -> float:
    return 0.0 if params_b is None else abs(parameters(config).total / 1e9 / params_b - 1)


def _chip(name: str) -> Chip | None:
    name = _STAND_INS.get(name, name)
    node = catalogue.find_node(name)
    return catalogue.find_chip(name) or (catalogue.chip(node.chip) if node else None)

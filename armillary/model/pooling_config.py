"""How a model's hidden states become embeddings, from the files that sentence-transformers keeps beside its weights.

modules.json lists transformer, pooling, dense layers and normalisation; 1_Pooling/config.json says which tokens are
pooled; config_sentence_transformers.json has the texts that go before queries and documents.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from armillary.errors import BadModel
from armillary.model.generation_config import read_json

Pool = Literal["last", "mean", "cls"]
_MODES: dict[str, Pool] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_NEWER: dict[str, Pool] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_HARMLESS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """Pooling of one model."""

    mode: Pool = "last"
    unsupported: str = ""  # why its embeddings cannot be computed here; empty: they can
    described: bool = False  # the folder has a modules.json: it was made for embeddings
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> text before a text, like query and document
    default_prompt: str = ""  # text before one whose kind is not known


def pooling_config(folder: Path) -> PoolingConfig:
    """Of a Hugging Face folder; last-token pooling where nothing says otherwise."""
    causal = _bidirectional(read_json(folder / "config.json"))
    modules = _modules(folder / "modules.json")
    if not modules:
        return PoolingConfig(unsupported=causal)
    kinds = {str(each.get("type", "")).rpartition(".")[2]: Path(str(each.get("path", ""))).name for each in modules}
    unknown_kinds = [kind for kind in kinds if kind not in _HARMLESS]
    mode, why = _mode(read_json(folder / kinds.get("Pooling", "1_Pooling") / "config.json"))
    if unknown_kinds:
        why = f"its modules.json has a {unknown_kinds[0]} layer, which is not computed here"
    settings = read_json(folder / "config_sentence_transformers.json")
    prompts = _texts(settings.get("prompts"))
    return PoolingConfig(
        mode=mode,
        unsupported=causal or why,
        described=True,
        prompts=prompts,
        default_prompt=prompts.get(str(settings.get("default_prompt_name")), ""),
    )


def _modules(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadModel(f"{path} is not JSON ({error}); fetch the folder again") from None
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise BadModel(f"{path} is no list of modules; fetch the folder again")
    return modules


def _bidirectional(config: Mapping[str, Any]) -> str:
    two_ways = config.get("is_causal") is False or config.get("use_bidirectional_attention") is True
    return "its attention looks in both directions, and only causal attention is computed here" if two_ways else ""


def _mode(config: Mapping[str, Any]) -> tuple[Pool, str]:
    """The mode, and why it is not supported."""
    mode_name = config.get("pooling_mode")
    if isinstance(mode_name, str):
        why = "" if mode_name in _NEWER else f"its pooling is {mode_name}, not last, mean or cls"
        return _NEWER.get(mode_name, "last"), why
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        text = " and ".join(name.removeprefix("pooling_mode_") for name in chosen) or "not given"
        return "last", f"its pooling is {text}, not last, mean or cls"
    if chosen == ["pooling_mode_mean_tokens"] and config.get("include_prompt") is False:
        return "mean", "its mean leaves out the tokens of a prompt, which is not supported"
    return _MODES[chosen[0]], ""


def _texts(prompts: Any) -> dict[str, str]:
    if prompts is not None and not isinstance(prompts, dict):
        raise BadModel("prompts in config_sentence_transformers.json is no object; take the model's own file")
    return {name: text for name, text in (prompts or {}).items() if isinstance(text, str)}

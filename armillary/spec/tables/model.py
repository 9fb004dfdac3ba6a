"""The recipe's [model] table: a name or a path, and any field of ModelConfig that differs.

num_layers and the catalogue's pattern keys change the layers; [model.rope], [model.moe], [model.mla] and
[model.simplicial] change single fields of what the model has, or add what it lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from armillary.errors import BadModel, BadRecipe
from armillary.spec.catalogue import layer_kinds
from armillary.spec.hf.user_family import load_family_file
from armillary.spec.model import MLA, Attention, LayerKind, ModelConfig, MoE, Rope, Simplicial, tile
from armillary.spec.toml.fields import build, convert, to_plain, unknown_key

PATTERN_HELP: Mapping[str, tuple[Any, str]] = {
    "num_layers": (int, "layers; the repeating pattern is truncated or continued"),
    "attention_pattern": (tuple[Attention, ...], "kinds of attention that layers cycle through"),
    "dense_first": (int, "layers before the first with experts"),
    "moe_every": (int, "every n-th layer after those has experts"),
    "nope_every": (int, "every n-th layer has no rotary positions; 0: none"),
}
"""key -> (type, help)"""
NESTED: Mapping[str, type[Any]] = {"rope": Rope, "moe": MoE, "mla": MLA, "simplicial": Simplicial}
_NOT_OVERRIDES = ("name", "layers")
_TEXTS = ("name", "path", "code")


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """Which model, and its overrides."""

    name: str = ""
    """a catalogue name, a Hub id or a run's name"""
    path: str = ""
    """a Hugging Face folder or a config.json"""
    code: str = ""
    """a Python file with the model's family, where that is your own (docs/models.md); it is run"""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """fields of ModelConfig that differ, written beside name or path"""

    @property
    def source(self) -> str:
        """What a user would type to get the model."""
        return self.path or self.name

    def load_code(self) -> None:
        """Register the family of `code`, before the model is looked up or its weights are named."""
        if self.code:
            load_family_file(self.code)


def model_table(values: Mapping[str, Any]) -> ModelTable:
    """The table of a recipe, its keys and types checked."""
    texts = {key: convert(str, values[key], f"model.{key}") for key in _TEXTS if key in values}
    overrides = typed_overrides({key: value for key, value in values.items() if key not in texts})
    if bool(texts.get("name")) == bool(texts.get("path")):
        raise BadRecipe("[model] needs either a name or a path; try --set model.name=armillary-25m")
    return ModelTable(**texts, overrides=overrides)


def table_to_plain(table: ModelTable) -> dict[str, Any]:
    """The table as it is written in a recipe; None, which TOML lacks, as the text none."""
    texts = {key: getattr(table, key) for key in _TEXTS if getattr(table, key)}
    return texts | {key: _without_none(value) for key, value in to_plain(table.overrides).items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items()}
    return "none" if value is None else value


# --- overrides


def override_hints() -> dict[str, Any]:
    """Every key of [model] beside name, path and code, with its type."""
    plain = {key: hint for key, hint in get_type_hints(ModelConfig).items() if key not in _NOT_OVERRIDES}
    return plain | {key: hint for key, (hint, _) in PATTERN_HELP.items()}


def typed_overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Known keys with values of their annotated types; inside a nested table, too."""
    hints = override_hints()
    ready: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            raise unknown_key(key, dict.fromkeys(_TEXTS, "") | hints, "model")
        nested = key in NESTED and isinstance(value, Mapping)
        ready[key] = _typed_table(key, value) if nested else convert(hints[key], value, f"model.{key}")
    return ready


def _typed_table(key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(NESTED[key])
    for name in values:
        if name not in hints:
            raise unknown_key(name, hints, f"model.{key}")
    return {name: convert(hints[name], value, f"model.{key}.{name}") for name, value in values.items()}


def apply_model_overrides(config: ModelConfig, overrides: Mapping[str, Any]) -> ModelConfig:
    """The model with `overrides` applied. head_dim follows hidden / heads where it was equal to it and is not given;
    kv_heads follows heads where they were equal. Everything else changes only if named."""
    given = typed_overrides(overrides)
    changes = {key: value for key, value in given.items() if key not in PATTERN_HELP and key not in NESTED}
    changes |= {key: _changed_table(config, key, given[key]) for key in NESTED if key in given}
    changes |= _following(config, changes)
    changes["layers"] = _layers(config, given)
    has_pairs = any(kind.attention == "2-simplicial" for kind in changes["layers"])
    if has_pairs and config.family in ("llama", "qwen3"):  # their config.json cannot say it, ours can
        changes.setdefault("family", "simplicial")
    return replace(config, **changes)


def _changed_table(config: ModelConfig, key: str, value: Any) -> Any:
    """A nested table: changed where the model has it, built where not, removed by none."""
    have = getattr(config, key)
    if not isinstance(value, Mapping):
        return value
    return replace(have, **value) if have is not None else build(NESTED[key], value, f"model.{key}")


def _following(config: ModelConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = changes.get("hidden", config.hidden), changes.get("heads", config.heads)
    derived: dict[str, Any] = {}
    if "kv_heads" not in changes and config.kv_heads == config.heads:
        derived["kv_heads"] = heads
    if "head_dim" in changes or config.head_dim * config.heads != config.hidden:
        return derived
    if heads < 1 or hidden % heads:
        raise BadModel(f"hidden={hidden} is not a multiple of heads={heads}; give model.head_dim, or other heads")
    return derived | {"head_dim": hidden // heads}


def _layers(config: ModelConfig, given: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Truncate or continue the layers, then derive anew what the pattern keys (or adding or removing experts) name."""
    pattern = {key: given[key] for key in PATTERN_HELP if key in given}
    pattern.setdefault("num_layers", config.num_layers)
    for key, low in (("num_layers", 1), ("moe_every", 1), ("dense_first", 0), ("nope_every", 0)):
        if pattern.get(key, low) < low:
            raise BadRecipe(f"model.{key}={pattern[key]} must be at least {low}; try --set model.{key}={low}")
    experts = given.get("moe", config.moe) is not None
    is_new = {
        "attention": "attention_pattern" in pattern,
        "mlp": "dense_first" in pattern or "moe_every" in pattern or experts != (config.moe is not None),
        "rope": "nope_every" in pattern,
    }
    layers, fresh = tile(config.layers, pattern["num_layers"]), layer_kinds(**pattern, moe=experts)
    return tuple(
        replace(old, **{part: new[part] for part in is_new if is_new[part]})
        for old, new in zip(layers, fresh, strict=True)
    )

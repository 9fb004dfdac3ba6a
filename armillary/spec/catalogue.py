"""The catalogue: models.toml and hardware.toml as typed objects, found by name or alias.

Also reads hardware strings: `h100x64` (chips in their default node), `dgx-h200x8` (nodes).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, NotFound, nearest
from armillary.spec.fields import build
from armillary.spec.hardware import Chip, Cluster, Link, Node, Price, Storage, Tier
from armillary.spec.model import LayerKind, ModelConfig

_HERE = Path(__file__).parent
_PATTERN_KEYS = ("num_layers", "attention_pattern", "dense_first", "moe_every", "nope_every")


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A catalogue model: its shape and where it comes from."""

    config: ModelConfig
    title: str = ""
    hub: str = ""
    source: str = ""
    published_parameters: str = ""
    aliases: tuple[str, ...] = ()
    note: str = ""


@cache
def _toml(name: str) -> dict[str, Any]:
    with (_HERE / name).open("rb") as file:
        return tomllib.load(file)


# --- models


def models() -> dict[str, ModelEntry]:
    """Every catalogue model by name, in the file's order."""
    return {name: model(name) for name in _toml("models.toml")}


@cache
def model(name: str) -> ModelEntry:
    """One catalogue model, by name or alias."""
    table = _toml("models.toml")
    found = _find(name, table)
    if found is None:
        raise _no_such("model", name, table, "armillary models")
    about = {key: table[found][key] for key in _ABOUT if key in table[found]}
    fields = {key: value for key, value in table[found].items() if key not in _ABOUT}
    about["aliases"] = tuple(about.get("aliases", ()))
    return ModelEntry(config=config_from_fields({"name": found} | fields, where=found), **about)


_ABOUT = ("title", "hub", "source", "published_parameters", "aliases", "note")


def config_from_fields(fields: Mapping[str, Any], *, where: str) -> ModelConfig:
    """ModelConfig from TOML fields; layer kinds come from num_layers and the pattern keys."""
    values = dict(fields)
    pattern = {key: values.pop(key) for key in _PATTERN_KEYS if key in values}
    if "layers" not in values:
        if "num_layers" not in pattern:
            raise BadInput(f"{where} lacks num_layers; add num_layers = …")
        values["layers"] = layer_kinds(**pattern, moe="moe" in values)
    values.setdefault("kv_heads", values.get("heads"))
    if "head_dim" not in values and values.get("heads"):
        values["head_dim"] = values.get("hidden", 0) // values["heads"]
    values.setdefault("ffn", 0)
    return build(ModelConfig, values, where)


def layer_kinds(
    *,
    num_layers: int,
    attention_pattern: list[str] | None = None,
    dense_first: int = 0,
    moe_every: int = 1,
    nope_every: int = 0,
    moe: bool = False,
) -> list[dict[str, Any]]:
    """One table a layer: attention cycles through the pattern, every `moe_every`-th layer after the first
    `dense_first` has experts, every `nope_every`-th has no rotary positions."""
    pattern = attention_pattern or ["full"]
    return [
        {
            "attention": pattern[i % len(pattern)],
            "mlp": "moe" if moe and i >= dense_first and (i + 1) % moe_every == 0 else "dense",
            "rope": not (nope_every and (i + 1) % nope_every == 0),
        }
        for i in range(num_layers)
    ]


# --- hardware


@cache
def chips() -> dict[str, Chip]:
    return {name: _chip(name, fields) for name, fields in _toml("hardware.toml")["chip"].items()}


def _chip(name: str, fields: Mapping[str, Any]) -> Chip:
    """TOML writes peaks as bf16_flops, sparse_fp8_flops …; the dataclass keeps them in mappings."""
    values: dict[str, Any] = {"name": name, "flops": {}, "sparse_flops": {}}
    for key, value in fields.items():
        peak = re.fullmatch(r"(sparse_)?(\w+?)_(?:fl)?ops", key)
        if peak:
            values["sparse_flops" if peak.group(1) else "flops"][peak.group(2)] = value
        else:
            values[key] = value
    return build(Chip, values, f"chip.{name}")


@cache
def links() -> dict[str, Link]:
    return _rows("link", Link)


@cache
def nodes() -> dict[str, Node]:
    return _rows("node", Node)


@cache
def storages() -> dict[str, Storage]:
    return _rows("storage", Storage)


@cache
def prices() -> tuple[Price, ...]:
    return tuple(build(Price, row, f"price[{i}]") for i, row in enumerate(_toml("hardware.toml")["price"]))


def _rows(kind: str, cls: type[Any]) -> dict[str, Any]:
    table = _toml("hardware.toml")[kind]
    return {name: build(cls, {"name": name} | fields, f"{kind}.{name}") for name, fields in table.items()}


def chip(name: str) -> Chip:
    """One chip, by name or alias."""
    found = _find(name, _toml("hardware.toml")["chip"])
    if found is None:
        raise _no_such("chip", name, chips(), "armillary hardware")
    return chips()[found]


def link(name: str) -> Link:
    if name not in links():
        raise _no_such("link", name, links(), "armillary hardware --links")
    return links()[name]


def cluster(text: str) -> Cluster:
    """A hardware string as a cluster: CHIP, CHIPxN or NODExN."""
    name, count = _split(text)
    tables = _toml("hardware.toml")
    node_name, chip_name = _find(name, tables["node"]), _find(name, tables["chip"])
    if count < 1:
        raise BadInput(f"'{text}' has {count} devices; write at least one, like {name}x8")
    if node_name:
        return _of_nodes(text, nodes()[node_name], count)
    if chip_name:
        return _of_chips(text, chips()[chip_name], count)
    raise _no_such("hardware", name, [*tables["chip"], *tables["node"]], "armillary hardware")


def _split(text: str) -> tuple[str, int]:
    tables = _toml("hardware.toml")
    if _find(text, tables["chip"]) or _find(text, tables["node"]):
        return text, 1
    match = re.fullmatch(r"(.+)x(-?\d+)", text.strip())
    return (match.group(1), int(match.group(2))) if match else (text.strip(), 1)


def _of_nodes(text: str, node: Node, count: int) -> Cluster:
    """`count` nodes; those that share a scale-up domain (NVL72) make up the inner tier together."""
    per_domain = min(node.domain, count)
    if count % per_domain:
        raise BadInput(
            f"'{text}': {count} nodes do not fill domains of {per_domain}; try {node.name}x{count - count % per_domain}"
        )
    inner = Tier(link=link(node.link), count=node.num_chips * per_domain, shape=node.shape)
    outer = Tier(link=link(node.network), count=count // per_domain)
    return Cluster(name=text, chip=chips()[node.chip], tiers=_only_real((inner, outer)), node=node)


def _of_chips(text: str, chip: Chip, count: int) -> Cluster:
    if count == 1:
        return Cluster(name=text, chip=chip, node=nodes().get(chip.node))
    if not chip.node:
        raise BadInput(f"{chip.name} has no default node; describe the tiers in [hardware]")
    node = nodes()[chip.node]
    per_domain = node.num_chips * node.domain
    if count <= per_domain:
        return Cluster(
            name=text, chip=chip, tiers=(Tier(link=link(node.link), count=count, shape=node.shape),), node=node
        )
    if count % per_domain:
        near = max(per_domain, count - count % per_domain)
        raise BadInput(f"{count} × {chip.name} do not fill {node.name} nodes of {per_domain}; try {chip.name}x{near}")
    return _of_nodes(text, node, count // node.num_chips)


def _only_real(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    return tuple(tier for tier in tiers if tier.count > 1)


# --- finding


def _find(name: str, table: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The key `name` stands for: itself, or the row that lists it as an alias."""
    wanted = name.strip().lower()
    if wanted in table:
        return wanted
    return next((key for key, row in table.items() if wanted in row.get("aliases", ())), None)


def _no_such(kind: str, name: str, options: Any, verb: str) -> NotFound:
    guess = nearest(name, options)
    hint = f"did you mean {guess}? ({verb} lists {len(options)})" if guess else f"{verb} lists {len(options)}"
    return NotFound(f"no {kind} '{name}'; {hint}")


__all__ = [
    "ModelEntry", "chip", "chips", "cluster", "config_from_fields", "link", "links", "model", "models",
    "nodes", "prices", "storages",
]  # fmt: skip

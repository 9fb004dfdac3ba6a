"""The catalogue: models.toml and hardware.toml as typed objects, found by name or alias.

Also reads hardware strings: `h100x64` (chips in their default node), `dgx-h200x8` (nodes).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, NotFound, nearest
from armillary.spec.hardware import DTYPES, Chip, Cluster, Link, Node, Price, Storage, Tier
from armillary.spec.model import ModelConfig, refuse_too_deep
from armillary.spec.toml.fields import build
from armillary.spec.toml.toml_files import Rows, read_rows

_HERE = Path(__file__).parent
_PATTERN_KEYS = ("num_layers", "attention_pattern", "dense_first", "moe_every", "nope_every")


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A catalogue model: its shape and its source."""

    config: ModelConfig
    title: str = ""
    hub: str = ""
    source: str = ""
    published_parameters: str = ""
    aliases: tuple[str, ...] = ()
    note: str = ""


@cache
def _models() -> Rows:
    return read_rows(_HERE / "models.toml")[""]


@cache
def _hardware() -> dict[str, Rows]:
    return read_rows(_HERE / "hardware.toml", grouped=True)


# --- models


def models() -> dict[str, ModelEntry]:
    """Every catalogue model by name, in the file's order."""
    return {name: model(name) for name in _models()}


@cache
def model(name: str) -> ModelEntry:
    """One catalogue model, by name or alias."""
    table = _models()
    key = table.find(name)
    if key is None:
        raise _no_such("model", name, table, "armillary models")
    about = {field: value for field, value in table[key].items() if field in _ABOUT}
    fields = {field: value for field, value in table[key].items() if field not in _ABOUT}
    about["aliases"] = tuple(about.get("aliases", ()))
    return ModelEntry(config=config_from_fields({"name": key} | fields, where=key), **about)


def has_model(name: str) -> bool:
    return _models().find(name) is not None


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
    """One table per layer: attention cycles through the pattern, every `moe_every`-th layer after the first
    `dense_first` has experts, every `nope_every`-th has no rotary positions."""
    refuse_too_deep(num_layers)
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


# bf16_flops -> bf16, int8_ops -> int8: no other key is a peak, so a misspelt one is refused
_PEAKS = {f"{dtype}_{'ops' if dtype.startswith('int') else 'flops'}": dtype for dtype in DTYPES}


@cache
def chips() -> dict[str, Chip]:
    """Every chip of the catalogue by name, in the file's order."""
    return {name: _chip_row(name) for name in _hardware()["chip"]}


@cache
def _chip_row(name: str) -> Chip:
    return _chip(name, _hardware()["chip"][name])


def _chip(name: str, fields: Mapping[str, Any]) -> Chip:
    """TOML writes peaks as bf16_flops, sparse_fp8_flops …; the dataclass has mappings of them."""
    values: dict[str, Any] = {"name": name, "flops": {}, "sparse_flops": {}}
    for key, value in fields.items():
        dtype = _PEAKS.get(key.removeprefix("sparse_"))
        if dtype:
            values["sparse_flops" if key.startswith("sparse_") else "flops"][dtype] = value
        else:
            values[key] = value
    return build(Chip, values, f"chip.{name}")


@cache
def links() -> dict[str, Link]:
    return {name: link(name) for name in _hardware()["link"]}


@cache
def nodes() -> dict[str, Node]:
    return {name: node(name) for name in _hardware()["node"]}


@cache
def node(name: str) -> Node:
    """One node, by its name in the catalogue."""
    return build(Node, {"name": name} | _hardware()["node"][name], f"node.{name}")


@cache
def storages() -> dict[str, Storage]:
    return {name: storage(name) for name in _hardware()["storage"]}


@cache
def storage(name: str) -> Storage:
    """One storage tier, by its name in the catalogue."""
    return build(Storage, {"name": name} | _hardware()["storage"][name], f"storage.{name}")


@cache
def prices(chip: str) -> tuple[Price, ...]:
    """Hourly prices of a chip; date and source are above the rows."""
    table = _hardware()["prices"][""]
    common = {"date": table["date"], "source": table["source"]}
    rows = enumerate(table["rows"])
    return tuple(build(Price, common | row, f"prices.rows[{i}]") for i, row in rows if row["chip"] == chip)


def chip(name: str) -> Chip:
    """One chip, by name or alias."""
    row = find_chip(name)
    if row is None:
        raise _no_such("chip", name, _hardware()["chip"], "armillary hardware")
    return row


def find_chip(name: str) -> Chip | None:
    """The same, or None; the error of `chip` looks for similar names, which takes milliseconds."""
    key = _hardware()["chip"].find(name)
    return None if key is None else _chip_row(key)


def find_node(name: str) -> Node | None:
    """One node by its name or an alias ('dgx-h100', 'p5.48xlarge'), or None."""
    key = _hardware()["node"].find(name)
    return None if key is None else node(key)


def find_link(name: str) -> Link | None:
    """One link, or None where the catalogue has none of this name."""
    return link(name) if name in _hardware()["link"] else None


@cache
def link(name: str) -> Link:
    if name not in _hardware()["link"]:
        raise _no_such("link", name, _hardware()["link"], "armillary hardware --links")
    return build(Link, {"name": name} | _hardware()["link"][name], f"link.{name}")


def cluster(text: str) -> Cluster:
    """A hardware string as a cluster: CHIP, CHIPxN or NODExN."""
    name, count = _split(text)
    chip_rows, node_rows = _hardware()["chip"], _hardware()["node"]
    node_name, chip_name = node_rows.find(name), chip_rows.find(name)
    if not node_name and not chip_name:
        raise _no_such("hardware", name, {**chip_rows, **node_rows}, "armillary hardware")
    if count < 1:
        raise BadInput(f"'{text}' has {count} devices; write at least one, like {name}x8")
    return _of_nodes(text, node(node_name), count) if node_name else _of_chips(text, chip(name), count)


def _split(text: str) -> tuple[str, int]:
    """'h100x64' -> ('h100', 64); a name that itself ends in x and digits (mi300x) is tried first."""
    text = text.strip().lower()
    if _hardware()["chip"].find(text) or _hardware()["node"].find(text):
        return text, 1
    match = re.fullmatch(r"(.+)x(-?\d+)", text)
    return (match.group(1), int(match.group(2))) if match else (text, 1)


def _of_nodes(text: str, node: Node, count: int) -> Cluster:
    """`count` nodes; those that share a scale-up domain (NVL72, a TPU pod) form the inner tier together."""
    per_domain = min(node.domain, count)
    if count % per_domain:
        raise _unfilled(text, count, per_domain, f"{node.title} domains of {per_domain} nodes")
    inner = Tier(link=link(node.link), count=node.num_chips * per_domain, shape=node.shape)
    outer = Tier(link=link(node.network), count=count // per_domain, oversubscription=node.oversubscription)
    tiers = tuple(tier for tier in (inner, outer) if tier.count > 1)
    return Cluster(name=text, chip=_chip_row(node.chip), tiers=tiers, node=node)


def _of_chips(text: str, chip: Chip, count: int) -> Cluster:
    """`count` chips in the chip's default node; more than one domain of them must fill domains."""
    if count == 1:
        return Cluster(name=text, chip=chip, node=node(chip.node) if chip.node else None)
    if not chip.node:
        raise BadInput(f"{chip.name} has no default node; describe the tiers in [hardware]")
    default = node(chip.node)
    per_domain = default.num_chips * default.domain
    if count > per_domain and count % per_domain:
        unit = "nodes" if default.domain == 1 else "domains"
        raise _unfilled(text, count, per_domain, f"{default.title} {unit} of {per_domain}")
    if count > per_domain:
        return _of_nodes(text, default, count // default.num_chips)
    tier = Tier(link=link(default.link), count=count, shape=default.shape)
    return Cluster(name=text, chip=chip, tiers=(tier,), node=default)


def _unfilled(text: str, count: int, size: int, what: str) -> BadInput:
    name, below = _split(text)[0], count - count % size
    return BadInput(f"'{text}': {count} do not fill {what}; try {name}x{below} or {name}x{below + size}")


# --- finding


def _no_such(kind: str, name: str, table: Mapping[str, Mapping[str, Any]], verb: str) -> NotFound:
    guess = nearest(name, [*table, *(alias for row in table.values() for alias in row.get("aliases", ()))])
    hint = f"did you mean {guess}? ({verb} lists {len(table)})" if guess else f"{verb} lists {len(table)}"
    return NotFound(f"no {kind} '{name}'; {hint}")

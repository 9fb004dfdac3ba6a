"""The model and the cluster of a row of a published table.

The model is the catalogue's where name and shape agree, else one built from the row's dimensions; what a row leaves
open (gated or plain MLP, tied or not) is chosen so that the parameters are nearest to its params_b. The cluster is the
catalogue's chip in its default node, with the stated network.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from math import inf, nan

from armillary.errors import BadInput
from armillary.planning.published.names import find_chip, find_model
from armillary.spec import catalogue
from armillary.spec.arithmetic.params import parameters
from armillary.spec.hardware import Chip, Cluster, Link, Node, Tier
from armillary.spec.model import LayerKind, ModelConfig, MoE, refuse_too_deep

Row = Mapping[str, str]
_LONGEST = 2**40


def is_fitted_on(config_id: str) -> bool:
    """Whether a row belongs to the half that fits: its id ends in an even hex digit."""
    return config_id.strip().lower().endswith(tuple("02468ace"))


def number(row: Row, name: str) -> float | None:
    """A cell as a number, None where it is empty; negative and infinite values are refused."""
    text = (row.get(name) or "").strip().replace(",", "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = nan
    if value is not None and not 0 <= value < inf:
        raise BadInput(f"{name}={text!r} is not a number from 0 up; correct the cell")
    return value


def integer(row: Row, name: str) -> int | None:
    """A cell as a count, None where it is empty or 0."""
    value = number(row, name)
    if value is not None and value != int(value):
        raise BadInput(f"{name}={value:g} is not a whole number; correct the cell")
    return int(value) if value else None


def model_of(row: Row) -> ModelConfig:
    """The row's model."""
    if (row.get("kind") or "") == "hybrid":
        raise BadInput("a hybrid model (state-space or other layers) is not a plain transformer")
    sizes = {name: number(row, name) for name in ("layers", "hidden", "heads")}
    name = row.get("model") or ""
    known = _in_catalogue(name, loose=not all(sizes.values()))
    if known is None and not any(sizes.values()):
        known = find_model(re.sub(r"\(.*?\)", "", name), number(row, "params_b"))
    if known is not None and all(size in (None, getattr(known, _FIELDS[name])) for name, size in sizes.items()):
        vocab = number(row, "vocab")
        return replace(known, context=_LONGEST, vocab=int(vocab) if vocab else known.vocab)
    if not all(sizes.values()):
        raise BadInput(
            f"no model '{name}' in the catalogue, and not all of layers, hidden and heads; fill them in, or take a "
            "name that armillary models lists"
        )
    return _nearest_in_size(row)


_FIELDS = {"layers": "num_layers", "hidden": "hidden", "heads": "heads"}


def second_token_layers(row: Row) -> int:
    """Layers that predict a second token (DeepSeek-V3 trains with one unless the name says w/o MTP)."""
    name = (row.get("model") or "").lower()
    return int("deepseek" in name and "v3" in name.replace(" ", "") and "w/o mtp" not in name)


# --- by name


def _in_catalogue(name: str, *, loose: bool) -> ModelConfig | None:
    """By letters and digits; `loose` also by a common beginning or a similar spelling."""
    names, wanted = _names(), _plain(name)
    if wanted in names or not wanted:
        return catalogue.model(names[wanted]).config if wanted else None
    if not loose:
        return None
    prefixes = [known for known in names if known.startswith(wanted) or wanted.startswith(known)]
    similar = get_close_matches(wanted, names, n=1, cutoff=0.9)
    best = min(prefixes, key=lambda known: abs(len(known) - len(wanted)), default=None) or next(iter(similar), None)
    return catalogue.model(names[best]).config if best else None


@cache
def _names() -> dict[str, str]:
    return {_plain(alias): name for name, entry in catalogue.models().items() for alias in (name, *entry.aliases)}


def _plain(name: str) -> str:
    """'LLAMA3.1_405B (SFT)' -> 'llama3.1405b'."""
    return re.sub(r"[^a-z0-9.]", "", re.sub(r"\(.*?\)|-instruct", "", name.lower()))


# --- by dimensions


def _nearest_in_size(row: Row) -> ModelConfig:
    """The variant (gated or not, tied or not) whose parameters are nearest to params_b."""
    wanted = number(row, "params_b")
    variants = [_build(row, gated=gated, tied=tied) for gated in (True, False) for tied in (False, True)]
    if wanted is None:
        plain = (number(row, "ffn") or 0) == 4 * (number(row, "hidden") or 0)
        return variants[2] if plain else variants[0]
    return min(variants, key=lambda model: abs(parameters(model).total - wanted * 1e9))


def _build(row: Row, *, gated: bool, tied: bool) -> ModelConfig:
    layers, hidden, heads = (integer(row, name) or 0 for name in ("layers", "hidden", "heads"))
    refuse_too_deep(layers)
    experts = int(number(row, "experts") or 0)
    ffn = int(number(row, "ffn") or 4 * hidden)
    moe = None
    if experts:
        moe = MoE(num_experts=experts, top_k=int(number(row, "top_k") or 1), ffn=int(number(row, "moe_ffn") or ffn))
    kind = LayerKind(mlp="moe" if experts else "dense")
    return ModelConfig(
        name=row.get("model") or "row",
        hidden=hidden,
        heads=heads,
        kv_heads=int(number(row, "kv_heads") or heads),
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=int(number(row, "vocab") or 50_304),
        context=_LONGEST,
        layers=(kind,) * layers,
        tied=tied,
        gated=gated,
        moe=moe,
        norm="rms" if gated else "layer",
    )


def cluster_of(row: Row, num_devices: int) -> Cluster:
    """`num_devices` of the row's chip; where one chip counts as several devices (Trainium's cores), each is a part."""
    stated = int(number(row, "n_gpus") or num_devices)
    chip = limited_chip(row.get("gpu") or "", chip_of(row.get("gpu") or ""))
    parts = num_devices // stated if stated and num_devices % stated == 0 else 1
    part = replace(chip_part(chip, parts), num_sms=max(1, (chip.num_sms or 1) // parts)) if parts > 1 else chip
    node = catalogue.nodes().get(chip.node)
    if node is not None and (per_node := re.search(r"(\d+) GPUs/node", row.get("interconnect") or "")):
        node = replace(node, num_chips=int(per_node.group(1)))
    if node is None or num_devices == 1:
        return Cluster(name=row.get("gpu") or chip.name, chip=part, node=node)
    domain = min(node.num_chips * node.domain * parts, num_devices)
    inner = next(size for size in range(domain, 0, -1) if num_devices % size == 0)  # 64 of an NVL72 rack's 72
    network = _stated_network(row.get("interconnect") or "", node) or catalogue.link(node.network)
    scale_up = Tier(link=_divided(catalogue.link(node.link), parts), count=inner, shape=node.shape)
    scale_out = Tier(link=_divided(network, parts), count=num_devices // inner, oversubscription=node.oversubscription)
    tiers = tuple(tier for tier in (scale_up, scale_out) if tier.count > 1)
    return Cluster(name=row.get("gpu") or chip.name, chip=part, node=node, tiers=tiers)


def chip_part(chip: Chip, parts: int) -> Chip:
    """One of `parts` equal parts of a chip, apart from its number of multiprocessors."""
    return replace(
        chip,
        memory_bytes=(chip.memory_bytes or 0) / parts,
        memory_bytes_per_s=(chip.memory_bytes_per_s or 0) / parts,
        flops={dtype: flops / parts for dtype, flops in chip.flops.items()},
    )


def _divided(link: Link, parts: int) -> Link:
    return link if parts == 1 or link.bytes_per_s is None else replace(link, bytes_per_s=link.bytes_per_s / parts)


def chip_of(text: str) -> Chip:
    """'A100-80GB-SXM', 'TPU v4', 'DGX-H100', 'A100 (unconfirmed)' as a chip of the catalogue."""
    chip = find_chip(text)
    if chip is None:
        raise BadInput(f"no chip '{text}' in the catalogue; armillary hardware lists them")
    return chip


def limited_chip(text: str, chip: Chip) -> Chip:
    """The chip under the power limit that `text` states, as in 'A100-80GB (330W limit)'."""
    stated = re.search(r"\b(\d{2,4}) ?W\b", text)
    return replace(chip, power_limit_w=float(stated.group(1))) if stated else chip


def _stated_network(text: str, node: Node) -> Link | None:
    """'1600 Gbps/node RoCE' or '8x200Gb HDR': the rate per chip; None where nothing is stated."""
    per_node = re.search(r"(\d+) ?Gbps/node", text)
    per_card = re.search(r"(\d+)\s*x\s*(\d+) ?Gb", text)
    if per_node:
        gigabits = float(per_node.group(1)) / node.num_chips
    elif per_card:
        gigabits = float(per_card.group(1)) * float(per_card.group(2)) / node.num_chips
    else:
        return None
    usual = catalogue.link(node.network)
    return replace(usual, name="stated", title=f"{gigabits:g} Gb/s per chip", bytes_per_s=gigabits * 1e9 / 8)

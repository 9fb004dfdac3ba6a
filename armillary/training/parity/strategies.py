"""The strategies that are held against one process, each on as many ranks as it can use."""

from collections.abc import Sequence
from math import prod
from typing import Any

from armillary.errors import BadInput, nearest
from armillary.spec.layout import Layout

STRATEGIES: dict[str, dict[str, Any]] = {
    "DDP": dict(zero=0),
    "ZeRO-1": dict(zero=1),
    "ZeRO-2": dict(zero=2),
    "ZeRO-3 (FSDP2)": dict(zero=3),
    "HSDP": dict(zero=3, shard="half"),
    "tp": dict(tp="all", sequence_parallel=False),
    "tp + sp": dict(tp="all"),
    "DDP × tp": dict(tp=2, zero=0),
    "ZeRO-1 × tp": dict(tp=2, zero=1),
    "FSDP2 × tp": dict(tp=2, zero=3),
    "HSDP × tp": dict(tp=2, zero=3, shard="half"),
}
EXPERTS: dict[str, dict[str, Any]] = {
    "experts: DDP": dict(),
    "experts: FSDP2": dict(zero=3),
    "experts: tp": dict(tp="all", sequence_parallel=False),
    "experts: tp + sp": dict(tp="all"),
    "experts: ep": dict(ep="all"),
    "experts: ep × FSDP2": dict(ep="all", zero=3),
    "experts: ep × dp": dict(ep=2),
    "experts: ep × dp × ZeRO-1": dict(ep=2, zero=1),
    "experts: ep × dp × FSDP2": dict(ep=2, zero=3),
    "experts: ep × HSDP": dict(ep=2, zero=3, shard="half"),
    "experts: ep × tp": dict(ep=2, tp=2),
    "experts: ep × FSDP2 × tp": dict(ep=2, tp=2, zero=3),
    "experts: ep × pp": dict(ep=2, pp=2),
    "experts: ep × pp × ZeRO-1": dict(ep=2, pp=2, zero=1),
    "experts: ep × FSDP2, offloaded": dict(ep="all", zero=3, offload="both"),
    "experts: ep × cp": dict(ep=2, cp=2),
    "experts: ep × cp × FSDP2": dict(ep=2, cp=2, zero=3),
    "experts: ep × pp × tp": dict(ep=2, pp=2, tp=2),
}
"""of a model with experts"""
STAGED: dict[str, dict[str, Any]] = {
    "cp": dict(cp="all"),
    "cp × ZeRO-1": dict(cp="all", zero=1),
    "cp × dp": dict(cp=2),
    "cp × FSDP2": dict(cp=2, zero=3),
    "cp × tp": dict(cp=2, tp="all"),
    "cp × FSDP2 × tp": dict(cp=2, tp=2, zero=3),
    "pp (GPipe)": dict(pp="all", schedule="gpipe"),
    "pp (1F1B)": dict(pp="all"),
    "pp (interleaved)": dict(pp=2, schedule="interleaved", interleave=2, only=True),
    "pp (zero-bubble)": dict(pp="all", schedule="zero_bubble"),
    "pp × dp": dict(pp=2),
    "pp × ZeRO-1": dict(pp=2, zero=1, schedule="zero_bubble"),
    "pp × FSDP2": dict(pp=2, zero=3, schedule="interleaved", interleave=2),
    "pp × HSDP": dict(pp=2, zero=3, shard="half"),
    "pp × tp": dict(pp=2, tp="all"),
    "pp × FSDP2 × tp": dict(pp=2, tp=2, zero=3),
    "pp × cp": dict(pp=2, cp="all"),
    "pp × cp × FSDP2": dict(pp=2, cp=2, zero=3, schedule="gpipe"),
    "pp × cp × tp": dict(pp=2, cp=2, tp="all"),
}
"""of a dense model over pipeline stages, or over ranks that share rows; `only` as many ranks as it names"""
OFFLOADED: dict[str, dict[str, Any]] = {
    "DDP, offloaded": dict(offload="both"),
    "FSDP2, offloaded": dict(zero=3, offload="both"),
    "ZeRO-1, on disk": dict(zero=1, offload="nvme"),
    "FSDP2 × tp, offloaded": dict(tp=2, zero=3, offload="both"),
    "pp × dp, offloaded": dict(pp=2, offload="both"),
}
"""of a dense model whose optimizer states and activations are offloaded"""
_DENSE = STRATEGIES | STAGED | OFFLOADED


def _each_of(model: str) -> dict[str, dict[str, Any]]:
    dense = {f"{model}: {name}": fields for name, fields in _DENSE.items()}
    return dense | {name.replace("experts: ", f"{model}: "): fields for name, fields in EXPERTS.items()}


LATENT = _each_of("latent")
"""every one of these, of a DeepSeek-style model: latent attention, a dense layer, experts in groups"""
GPT_OSS = _each_of("gpt-oss")
"""the same, of a GPT-OSS-style model: sinks, a sliding layer, biases, experts in every layer"""
QWEN3_NEXT = {name: fields for name, fields in _each_of("qwen3-next").items() if "cp" not in fields}
"""the same but for context parallelism, of a Qwen3-Next-style model: a gated delta-net layer and one with attention"""
SIMPLICIAL = {f"2-simplicial: {name}": fields for name, fields in _DENSE.items() if "cp" not in fields}
"""those of a dense model but for context parallelism, of a model whose layers attend to pairs of tokens"""
ALL = _DENSE | EXPERTS | LATENT | GPT_OSS | QWEN3_NEXT | SIMPLICIAL


WORDS = {
    "dense": [*_DENSE],
    "experts": [*EXPERTS],
    "latent": [*LATENT],
    "gpt-oss": [*GPT_OSS],
    "qwen3-next": [*QWEN3_NEXT],
    "2-simplicial": [*SIMPLICIAL],
}
"""groups of strategies"""


def chosen(words: Sequence[str]) -> list[str]:
    """The strategies that the user names: by name, by a part of names (`pp`, `ep × tp`), by group; all for none."""
    selected: set[str] = set()
    for word in words:
        plain = _plain(word)
        exact = [name for name in ALL if _plain(name) == plain]
        parts = [name for name in ALL if plain and plain in _plain(name)]
        if not (names := WORDS.get(word.strip().lower()) or exact or parts):
            known = {_plain(name): name for name in (*ALL, *WORDS)}
            guess = nearest(plain, known)
            hint = f"did you mean '{known[guess]}'?" if guess else "--dry-run lists them"
            raise BadInput(f"no strategy '{word}'; {hint}")
        selected |= set(names)
    return [name for name in ALL if not words or name in selected]


def _plain(name: str) -> str:
    """As it may be typed: 'PPxTP' for 'pp × tp'."""
    return "".join(name.lower().replace("×", "x").split())


def layout_of(strategy: str, ranks: int, **also: object) -> Layout | None:
    """The strategy on that many ranks, in fp32; None where there are too few for it."""
    given = ALL[strategy]
    sizes = {name: given.get(name, 1) for name in ("tp", "pp", "cp")}
    rest = ranks // prod(size for size in sizes.values() if size != "all")
    sizes = {name: rest if size == "all" else size for name, size in sizes.items()}
    tp, fixed = sizes["tp"], {name: sizes[name] for name in ("pp", "cp")}
    inner, fills = tp * fixed["pp"] * fixed["cp"], "all" in given.values() and given.get("ep") != "all"
    if (fills and rest < 2) or (given.get("only") and ranks != inner) or fixed["pp"] > 4:
        return None
    dp, alone = ranks // inner, not fills and not given.get("only") and ranks < 2 * inner
    ep = dp if given.get("ep") == "all" else int(given.get("ep", 1))
    shard = dp // 2 if given.get("shard") == "half" else None
    # ep next to dp is only told apart from ep alone where some ranks hold the same experts
    all_experts = given.get("ep") == 2 and inner == 1 and dp == ep
    if alone or all_experts or shard == 1 or dp * fixed["cp"] % ep:
        return None
    fields = {
        key: given[key] for key in ("zero", "sequence_parallel", "schedule", "interleave", "offload") if key in given
    }
    return Layout(dp=dp, tp=tp, ep=ep, shard=shard, precision="fp32", **fixed, **fields, **also)  # type: ignore[arg-type]

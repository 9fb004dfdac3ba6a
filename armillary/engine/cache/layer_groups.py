"""Layer groups: layers that share a block table, and the tokens that they still need.

Layers with a recurrent state have no blocks and are in no group: their states are kept by row of the batch
(`runner.recurrent_states`).

All layers of a group see the same past: all tokens, a sliding window, or their own chunk. Groups have equally many
layers (the last of a kind may be padded), so a block has the same size in every group and one pool serves them all.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from armillary.errors import BadModel
from armillary.spec.model import LayerKind, ModelConfig

_MOST_GROUPS = 8  # more tables cost more time per step than the padding that they save


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that keep the same tokens."""

    sees: Literal["all", "window", "chunk"] = "all"
    """all earlier tokens, the last `reach` tokens, or the tokens of the same chunk of `reach`"""
    reach: int = 0
    """tokens of the window or chunk, the query itself included"""
    layers: tuple[int, ...] = ()
    """which layers of the model; tests and simulations may leave them out"""

    def first_needed(self, position: int) -> int:
        """First position that queries from `position` on still read."""
        if self.sees == "window":
            return max(0, position - self.reach + 1)
        return position - position % self.reach if self.sees == "chunk" else 0

    def blocks_at(self, tokens: int, block_tokens: int, step_tokens: int) -> int:
        """Most blocks a sequence of `tokens` holds, when at most `step_tokens` are computed at once."""
        all_blocks = -(-tokens // block_tokens)
        if self.sees == "all":
            return all_blocks
        return min(all_blocks, (self.reach - 1 + step_tokens + block_tokens - 2) // block_tokens + 1)

    def text(self) -> str:
        sight = {"all": "all tokens", "window": f"the last {self.reach:,}", "chunk": f"chunks of {self.reach:,}"}
        return f"{len(self.layers)} layers that see {sight[self.sees]}"


FULL_ATTENTION = (Group(),)


def layer_groups(config: ModelConfig) -> tuple[Group, ...]:
    """The groups of a model, full attention first."""
    kinds: dict[tuple[str, int], list[int]] = {}
    for index, layer in enumerate(config.layers):
        if layer.attention == "gated_delta":
            continue
        kinds.setdefault(_sight(config, layer), []).append(index)
    if not kinds:
        raise BadModel(f"{config.name} has no layer with attention, so no KV cache to schedule by; it can be trained")
    ordered = sorted(kinds.items(), key=lambda item: (item[0][0] != "all", item[1][0]))
    size = group_size([len(layers) for _, layers in ordered])
    return tuple(
        Group(sees=sees, reach=reach, layers=tuple(layers[start : start + size]))  # type: ignore[arg-type]
        for (sees, reach), layers in ordered
        for start in range(0, len(layers), size)
    )


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each pipeline stage, evenly; the first stages, which do not have the head, get the fewer."""
    ends = [stage * num_layers // stages for stage in range(stages + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def state_places(config: ModelConfig) -> dict[int, tuple[int, int]]:
    """Layer with a recurrent state -> (group, which it does not use, index among these layers)."""
    recurrent = [index for index, layer in enumerate(config.layers) if layer.attention == "gated_delta"]
    return {layer: (0, slot) for slot, layer in enumerate(recurrent)}


def group_size(counts: list[int]) -> int:
    """Layers per group: the size with the least padding, of those with few tables."""

    def cost(size: int) -> tuple[bool, int, int]:
        groups = sum(-(-count // size) for count in counts)
        return groups > max(_MOST_GROUPS, len(counts)), groups * size - sum(counts), groups

    return min(range(1, max(counts) + 1), key=cost)


def _sight(config: ModelConfig, layer: LayerKind) -> tuple[str, int]:
    if layer.attention == "2-simplicial":
        assert config.simplicial is not None
        return "window", max(config.simplicial.window_1, config.simplicial.window_2)
    if layer.attention == "full":
        return "all", 0
    assert config.window is not None
    return ("window" if layer.attention == "sliding" else "chunk"), config.window

"""Which layers of a KV block come from which pipeline stage of a prefill server.

A block holds the layers of one group, in their order, and on a stage those of them that the stage has: neighbours, so
a range of the places that they have in a whole block. On a stage all blocks are as large as the largest of its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from armillary.engine.cache.layer_groups import Group, stage_layers


class StageSlots(NamedTuple):
    """Of one stage."""

    by_group: tuple[range, ...]
    """places of its layers in a whole block, by the group of the block"""

    @property
    def num_slots(self) -> int:
        """Places of a block on that stage."""
        return max(len(slots) for slots in self.by_group)


def stage_slots(groups: Sequence[Group], stages: int) -> list[StageSlots]:
    """Of every stage; layers without a KV cache are in no group and count all the same."""
    num_layers = 1 + max(layer for group in groups for layer in group.layers)
    return [StageSlots(tuple(_places(group, own) for group in groups)) for own in stage_layers(num_layers, stages)]


def _places(group: Group, own: range) -> range:
    begin = sum(layer < own.start for layer in group.layers)
    return range(begin, begin + sum(layer in own for layer in group.layers))

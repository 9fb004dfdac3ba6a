"""What a node of an elastic run looks for while its ranks run: nodes that failed, and nodes that wait to join."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli.train.launch import EndRanks, Launched
from armillary.cli.train.rank_processes import RankProcesses
from armillary.spec.layout_rules.elastic import elastic_layout

if TYPE_CHECKING:
    from armillary.cli.train.elastic import ElasticNode
    from armillary.training.resilience.node_rendezvous import NodeRendezvous, Round

CHECK_S = 0.5
"""seconds between looks at what other nodes tell"""


class RoundCheck:
    """Called while this node's ranks run: has another node failed, or does one wait to join?"""

    def __init__(self, node: ElasticNode, meeting: NodeRendezvous, members: Round, start: dict[str, Any]) -> None:
        self._node, self._meeting, self._members, self._start = node, meeting, members, start
        self._checked = 0.0
        self._asked = False

    def __call__(self, ranks: RankProcesses) -> None:
        now = time.monotonic()
        if now - self._checked < CHECK_S:
            return
        self._checked = now
        self._look()
        if self._members.is_leader and not self._asked and self._may_grow(ranks):
            self._asked = True
            self._node.out.say("another node waits: the ranks save and stop, and go on with it")
            ranks.signal(signal.SIGTERM)

    def idle(self) -> Launched:
        """Until the ranks of the other nodes have ended."""
        while self._members.read("outcome") is None:
            self._look()
            time.sleep(CHECK_S)
        return Launched(outcome={}, interrupted=False)

    def _look(self) -> None:
        members = self._members
        for key in ("fatal", "failed"):
            if (why := members.read_first(key)) is not None:
                raise EndRanks(str(why))
        if lost := members.lost_nodes():
            why = f"node {lost[0]} is lost: no sign of life"
            self._node.failed(self._meeting, members, self._start, why)
            raise EndRanks(why)

    def _may_grow(self, ranks: RankProcesses) -> bool:
        """Whether nodes wait with which there would be more data-parallel ranks, and these ranks can stop in order."""
        from armillary.training.resilience.rank_heartbeat import HeartbeatBoard, board_name

        node, place = self._node, ranks.place
        waiting = self._meeting.num_waiting()
        if not waiting:
            return False
        beat = HeartbeatBoard(place.store, board_name(Path(self._start["run"]), "0")).read(0)
        if beat is None or not beat.is_steady:
            return False
        recipe, more = node.recipe, place.world + waiting * node.devices
        layout = elastic_layout(recipe.layout, node.config, recipe.train, more)
        return layout is not None and layout.num_devices > place.world

"""`armillary train --nodes MIN:MAX`: a run whose nodes come and go. Every node runs the same command.

The nodes of a round are those that met in torchrun's rendezvous. Its first node leads (leader.py): it plans the layout
for all of their devices, opens the run, watches for hangs and lets waiting nodes in. Where a node or a rank is lost, or
another node waits, the round ends, and the next one goes on from the newest checkpoint with as many data-parallel ranks
as there are devices for. The batch stays the same: its rows are shared out among the ranks that there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli.output import Output
from armillary.cli.train.launch import EndRanks, HangWatch, Launched, RankDied, RunHung, launch_once
from armillary.cli.train.leader import Leader, share_out
from armillary.cli.train.node_exclusion import NodeExcluded, node_facts, refuse_excluded
from armillary.cli.train.rank_processes import Place
from armillary.cli.train.round_check import CHECK_S, RoundCheck
from armillary.errors import ArmillaryError
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.store.run_events import add_event
from armillary.store.runs import Run
from armillary.store.writer_process import machine

if TYPE_CHECKING:
    from armillary.training.prepare_run import ResolvedRun
    from armillary.training.resilience.node_rendezvous import NodeRendezvous, Nodes, Round

OUTCOME_S, BYE_S = 120.0, 15.0
"""for the leader to tell how the ranks ended, and for all nodes to have read it"""
FATAL_S = 3.0
"""for an error that another node reports of its ranks, before its loss counts as a failure that may pass"""

OpenRun = Callable[[Output, "ResolvedRun"], tuple["ResolvedRun", Run]]


@dataclass(kw_only=True)
class ElasticNode:
    """One node of an elastic run: `train()` until the run ends, or this node is told to leave."""

    out: Output
    home: Home
    recipe: Recipe
    config: ModelConfig
    nodes: Nodes
    devices: int  # ranks of this node
    planning: Mapping[str, Any]  # device, until
    open_run: OpenRun  # opens it the first time
    program: str = "armillary.cli.train.rank"
    store: Any = None  # in which the ranks meet, where this node leads

    def train(self) -> dict[str, Any]:
        """How the run ended: as its main rank says, or with `finished` false where this node left."""
        from armillary.training.resilience.node_rendezvous import NodeRendezvous

        meeting = NodeRendezvous(self.nodes, self.recipe_id)
        while True:
            refuse_excluded(meeting.noted("excluded"), self._facts(meeting))
            self.out.say(f"waiting at {self.nodes.where} for nodes: {self.nodes.least} to {self.nodes.most} take part")
            members = meeting.join()
            try:
                outcome = self._take_part(meeting, members)
            except NodeExcluded:
                raise
            except BaseException as error:
                self._note_failure(meeting, members, error)
                raise
            finally:
                members.end()
            if outcome is not None:
                return outcome

    @property
    def recipe_id(self) -> str:
        """The same on all nodes of a run."""
        return f"armillary-{self.config.name}"

    # --- one round

    def _take_part(self, meeting: NodeRendezvous, members: Round) -> dict[str, Any] | None:
        """The outcome where the run has ended, or this node leaves; None where another round follows."""
        posted = members.gather("node", self._facts(meeting))
        if posted is None:
            return None
        start = Leader(self, meeting, members, posted).start() if members.is_leader else members.wait_for("start")
        if start is None:
            return None
        if start.get("fatal"):
            raise ArmillaryError(start["fatal"])
        if "leaves" in start:
            self._leave_out(members, start)
            return None
        if start.get("waits"):
            self.out.warn(start["waits"])
            while not meeting.num_waiting():
                time.sleep(CHECK_S)
            return None
        return self._train(meeting, members, posted, start)

    def _facts(self, meeting: NodeRendezvous) -> dict[str, Any]:
        return node_facts(self.devices, is_host=meeting.is_host)

    def _leave_out(self, members: Round, start: dict[str, Any]) -> None:
        """One node has no part any more: it ends here, and the others meet again."""
        if start["leaves"] == members.node:
            raise NodeExcluded(f"{start['why']}; start it again with a new run, when it is as fast as the others")
        self.out.warn(start["why"])

    def _train(
        self, meeting: NodeRendezvous, members: Round, posted: list[Any], start: dict[str, Any]
    ) -> dict[str, Any] | None:
        try:
            launched = self._launch(meeting, members, posted, start)
        except (RankDied, RunHung) as error:
            if isinstance(error, RunHung) and start["on_hang"] == "exit":
                members.post_first("fatal", str(error))
                raise
            self.failed(meeting, members, start, str(error).partition(";")[0])
            return None
        except EndRanks:
            self._after_failure(members)
            return None
        except ArmillaryError as error:
            members.post_first("fatal", str(error))
            raise
        except BaseException:  # Ctrl-C, or a bug: the others go on
            with suppress(ArmillaryError):
                members.post_first("failed", f"node {members.node} was stopped")
            raise
        return self._ended(meeting, members, start, launched)

    def _launch(self, meeting: NodeRendezvous, members: Round, posted: list[Any], start: dict[str, Any]) -> Launched:
        """The ranks of this node, or none where the layout has no use for them."""
        from armillary.machine.cores import compute_threads

        counts = share_out(posted, start["ranks"])
        first, count = sum(counts[: members.node]), counts[members.node]
        here = sum(n for n, node in zip(counts, posted, strict=True) if node["machine"] == machine())
        host, port = start["address"]
        place = Place(
            count=count,
            first=first,
            world=start["ranks"],
            host=host,
            port=port,
            store=self.store if members.is_leader else None,
            on_loopback=len({node["machine"] for node in posted}) == 1,
        )
        check = RoundCheck(self, meeting, members, start)
        folder = Path(start["run"])
        if not count:
            self.out.say(f"node {members.node} has no part in {start['layout']}, and waits")
            return check.idle()
        if not members.is_leader:
            self.out.say(f"node {members.node}: ranks {first} to {first + count - 1} of {start['ranks']}")
        return launch_once(
            self.program,
            {**start["task"], "mode": self.out.mode},
            place,
            compute_threads(here) if start["on_cpu"] else None,
            folder / "logs",
            watch=self._watch(folder, start) if members.is_leader else None,
            meanwhile=check,
        )

    def _watch(self, folder: Path, start: dict[str, Any]) -> HangWatch:
        return HangWatch(folder=folder, on_hang=start["on_hang"], say=self.out.warn, remote_data=start["remote_data"])

    # --- the end of a round

    def failed(self, meeting: NodeRendezvous, members: Round, start: dict[str, Any], why: str) -> None:
        """A rank of this node, or another node, is lost: all nodes meet again."""
        if members.post_first("failed", why):
            meeting.note("failure", why)
            add_event(Path(start["run"]), "restarting", error=why)
            add_event(Path(start["run"]), "waiting")
            self.out.warn(why)
        self._after_failure(members)

    def _after_failure(self, members: Round) -> None:
        """Another node may know that a restart is of no use."""
        end = time.monotonic() + FATAL_S
        while (fatal := members.read_first("fatal")) is None and time.monotonic() < end:
            time.sleep(CHECK_S)
        if fatal is not None:
            raise ArmillaryError(fatal)

    def _ended(
        self, meeting: NodeRendezvous, members: Round, start: dict[str, Any], launched: Launched
    ) -> dict[str, Any] | None:
        """All ranks have ended in order: the run is finished, this node leaves, or another one wants to join."""
        if members.is_leader and launched.outcome:
            members.post("outcome", launched.outcome)
        outcome: dict[str, Any] | None = launched.outcome or members.wait_for("outcome", seconds=OUTCOME_S)
        leaves = launched.interrupted or (outcome or {}).get("finished", False)
        if outcome is None and not leaves:
            return None
        if leaves and meeting.is_host:
            members.post("closing", True)
        if not leaves:
            if members.is_leader:
                add_event(Path(start["run"]), "waiting")
            time.sleep(1.0)
            leaves = bool(members.read("closing"))
        if not leaves:
            return None
        if meeting.is_host:
            meeting.close()
        self._say_bye(meeting, members)
        if outcome is None:
            raise KeyboardInterrupt
        return outcome

    def _note_failure(self, meeting: NodeRendezvous, members: Round, error: BaseException) -> None:
        """The leader's, in the run's folder; what other nodes report of the same error adds nothing."""
        from armillary.training.gauge_log import note_failure

        with suppress(ArmillaryError):
            if members.is_leader and (job := meeting.noted("run")):
                note_failure(Run(folder=Path(job["folder"]), owner=job["owner"]), error)
            self._say_bye(meeting, members)

    def _say_bye(self, meeting: NodeRendezvous, members: Round) -> None:
        """The store ends with its launcher: it waits until the others have read what they need."""
        members.post(f"bye/{members.node}", True)
        end = time.monotonic() + BYE_S
        while meeting.is_host and time.monotonic() < end:
            if all(members.read(f"bye/{node}") for node in range(members.num_nodes)):
                return
            time.sleep(CHECK_S)

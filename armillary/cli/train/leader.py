"""The first node of a round leads it: it plans the layout for the devices of all nodes, opens the run, and tells the
others what to start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli.output import Output
from armillary.cli.train.node_exclusion import excluded_node, round_facts
from armillary.cli.train.planning import begin
from armillary.cli.train.rank_processes import new_store
from armillary.cli.train.restarts import Restarts
from armillary.errors import ArmillaryError, BadLayout
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.elastic import elastic_layout, ranks_per_replica
from armillary.store.run_events import add_event
from armillary.store.runs import Run

if TYPE_CHECKING:
    from armillary.cli.train.elastic import ElasticNode
    from armillary.training.prepare_run import ResolvedRun
    from armillary.training.resilience.node_rendezvous import NodeRendezvous, Round


@dataclass
class Leader:
    """Of one round; `posted` is what each node told of itself."""

    node: ElasticNode
    meeting: NodeRendezvous
    members: Round
    posted: list[Any]

    def start(self) -> dict[str, Any]:
        """Plan for the devices of all nodes, open the run, and tell the others."""
        try:
            start = self._without_straggler() or self._start()
        except KeyboardInterrupt:
            with suppress(ArmillaryError):
                self.members.post("start", {"leaves": self.members.node, "why": "the leading node was stopped"})
            raise
        except Exception as error:  # a bug, too, would be the same on the next leader
            known = isinstance(error, ArmillaryError)
            text = str(error) if known else f"the leading node failed ({error!r}); see what it said, and start again"
            with suppress(ArmillaryError):
                self.members.post("start", {"fatal": text})
            raise
        self.members.post("start", start)
        return start

    def _without_straggler(self) -> dict[str, Any] | None:
        """Which node leaves, where the last round had a straggler and the run can do without it."""
        job, last, recipe = self.meeting.noted("run"), self.meeting.noted("round"), self.node.recipe
        if not (recipe.train.exclude_stragglers and job and last):
            return None
        run = Run(folder=Path(job["folder"]), owner=job["owner"])
        slow = excluded_node(run, last, others_wait=self.meeting.num_waiting() > 0)
        self.meeting.note("round", None)  # judged
        leaves = [n for n, node in enumerate(self.posted) if slow is not None and node["launcher"] == slow.launcher]
        if slow is None or not leaves:
            return None
        left = sum(node["devices"] for node in self.posted) - self.posted[leaves[0]]["devices"]
        enough = len(self.posted) > self.node.nodes.least and left > 0
        if not enough or elastic_layout(recipe.layout, self.node.config, recipe.train, left) is None:
            self.node.out.warn(f"{slow.why}; its node stays, as the run needs {self.node.nodes.least} nodes")
            return None
        self.meeting.note("excluded", [*(self.meeting.noted("excluded") or ()), asdict(slow)])
        add_event(run.folder, "waiting", excluded=slow.text)
        return {"leaves": leaves[0], "why": slow.text}

    def _start(self) -> dict[str, Any]:
        from armillary.training.resilience.watcher import reads_remote

        node, meeting = self.node, self.meeting
        num_ranks = sum(each["devices"] for each in self.posted)
        layout = elastic_layout(node.recipe.layout, node.config, node.recipe.train, num_ranks)
        if layout is None:
            if job := meeting.noted("run"):
                add_event(Path(job["folder"]), "waiting")
            inner, need = node.recipe.layout.text("tp", "pp", "cp"), ranks_per_replica(node.recipe.layout)
            return {"waits": f"{num_ranks} ranks are fewer than {inner} needs ({need}); waiting for more nodes"}
        try:
            begun, run = self._open(layout)
        except BadLayout as error:
            if meeting.noted("run") is None:
                raise
            return {"waits": f"{error}; waiting for more nodes"}  # it fitted the memory of more devices
        job = begun.recipe.train
        node.out.say(f"{num_ranks} ranks on {layout.text()}: {rows_text(layout, job.batch_tokens // job.sequence)}")
        meeting.note("round", round_facts(self.posted, share_out(self.posted, layout.num_devices)))
        until, store = node.planning.get("until"), new_store(meeting.address)
        node.store = store
        return {
            "run": str(run.folder),
            "ranks": layout.num_devices,
            "layout": layout.text(),
            "address": [store.host, store.port],
            "on_cpu": begun.plan.cluster.chip.kind == "cpu" or node.planning.get("device") == "cpu",
            "on_hang": job.on_hang,
            "remote_data": reads_remote(begun.plan),
            "task": {
                "run": str(run.folder),
                "owner": run.owner,
                "device": node.planning.get("device"),
                "brief": False,
                "home": {"work": str(node.home.work), "cache": str(node.home.cache)},
                "until": f"{until.gauge}={until.value!r}" if until else "",
            },
        }

    def _open(self, layout: Layout) -> tuple[ResolvedRun, Run]:
        """The run, with a plan for this layout: opened the first time, and then taken from the leader before."""
        node, meeting = self.node, self.meeting
        job: dict[str, Any] | None = meeting.noted("run")
        shown = node.out if job is None else Output("silent")
        recipe = replace(node.recipe, layout=layout)
        begun = begin(shown, node.home, recipe, **{**node.planning, "devices": layout.num_devices})
        begun = replace(begun, recipe=node.recipe)  # as it was given, so that a run resumes with any number of nodes
        if job is None:
            begun, run = node.open_run(shown, begun)
        else:
            begun, run = self._reopen(begun, job)
        meeting.note("run", {"folder": str(run.folder), "owner": run.owner})
        return begun, run

    def _reopen(self, begun: ResolvedRun, job: dict[str, Any]) -> tuple[ResolvedRun, Run]:
        meeting, out = self.meeting, self.node.out
        run = Run(folder=Path(job["folder"]), owner=job["owner"])
        begun = begun.with_settings_of(run)
        run = run.claim(take_over=True, say=out.say)
        run.write_plan(begun.plan)
        failure, most = meeting.noted("failure"), begun.recipe.train.max_restarts
        restarts = Restarts(run, most, out.warn)
        restarts.load(meeting.noted("restarts") or restarts.state())
        if failure is None:
            add_event(run.folder, "restarting")
            return begun, run
        if not restarts.allows(failure):
            note = f"{failure}, and {most} restarts without a new checkpoint have been; see {run.folder / 'logs'}"
            raise ArmillaryError(f"{note}, and train again")
        meeting.note("restarts", restarts.state())
        meeting.note("failure", None)
        return begun, run


def share_out(nodes: Sequence[Mapping[str, Any]], num_ranks: int) -> list[int]:
    """Ranks of each node: its devices, in order, as long as there are ranks left."""
    counts: list[int] = []
    for node in nodes:
        counts.append(min(node["devices"], num_ranks - sum(counts)))
    return counts


def rows_text(layout: Layout, rows: int) -> str:
    each, more = divmod(rows, layout.dp)
    if not more:
        return f"{each} rows of the batch of {rows} each"
    return f"{each} or {each + 1} rows of the batch of {rows} each"

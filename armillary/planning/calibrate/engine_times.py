"""What engine steps took and what the planner says of their parts, for corrections (device_model/correction.py).

Our own runs recorded each step with its work. The page of another server has means alone: a mean step has R decodes,
R requests running, and the prompts that come while each of them generates its tokens, R · prompt / output tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from armillary.engine.scheduler.decision import StepWork
from armillary.errors import BadInput
from armillary.planning.calibrate.run_times import Described
from armillary.planning.device_model.correction import PARTS, RunTime
from armillary.planning.serving.deployment_options import server_of
from armillary.planning.serving.engines import rates_for
from armillary.planning.serving.forward_ops import Group
from armillary.planning.serving.replica import Replica
from armillary.planning.serving.serving_plan import serving_request
from armillary.spec.plan import Plan
from armillary.spec.recipe import recipe_from_dict
from armillary.spec.tables.traffic import Traffic
from armillary.stats import percentile
from armillary.store.gauges import Record
from armillary.store.home import Home

MOST_STEPS = 400
"""recorded steps that are priced, evenly spread over the run"""
SLOWEST = 90
"""percentile to which the slowest steps are cut: what else a machine does is no property of its chip"""


@dataclass(frozen=True, kw_only=True)
class MeanStep:
    """The mean engine step of a server's metrics page, of one replica."""

    running: float
    tokens_in: float
    """prompt tokens per request"""
    computed: float
    """those of them that were not in the prefix cache"""
    tokens_out: float
    gap_s: float
    """mean inter-token latency"""


def own_engine_time(name: str, steps: Sequence[Record], plan: Plan, home: Home) -> RunTime:
    """A serving run of ours: its recorded steps, priced by today's planner."""
    if plan.serve is None:
        raise BadInput(f"{name} is no serving run; calibrate with runs of armillary serve, or pages with their recipes")
    if plan.serve.dp_attention > 1:
        raise BadInput(f"{name} ran with data-parallel attention, which is not priced; calibrate with other runs")
    longest = plan.serve.max_model_len or plan.model.context
    fits = Traffic(
        tokens_in=max(1, longest // 2), tokens_out=max(1, longest // 4)
    )  # its steps say what was asked of it
    recipe = replace(recipe_from_dict(plan.recipe), layout=plan.layout, serve=plan.serve, traffic=fits)
    request = serving_request(recipe, plan.model, plan.cluster, home, is_corrected=False)
    replica = server_of(request, plan.layout).replica
    chosen = [record for record in steps if record.get("prefill_tokens") or record.get("decode_tokens")]
    chosen = chosen[:: -(-len(chosen) // MOST_STEPS) or 1]
    if not chosen:
        raise BadInput(f"{name} has no engine step with tokens; send it some requests")
    seconds = [float(record["engine_step_s"]) for record in chosen]
    most = percentile(seconds, SLOWEST)
    planned = [replica.step_of(StepWork.of(record)).parts() for record in chosen]
    return RunTime(
        name=name,
        measured_s=sum(min(value, most) for value in seconds) / len(chosen),
        planned={part: sum(parts[part] for parts in planned) / len(chosen) for part in PARTS},
    )


def page_time(name: str, mean: MeanStep, by: str, described: Described, home: Home) -> RunTime:
    """The page of a server with the recipe that describes it; the server's declared rates, else the physics."""
    asked = Traffic(tokens_in=max(1, round(mean.tokens_in)), tokens_out=max(1, round(mean.tokens_out)))
    recipe = replace(described.recipe, traffic=asked)
    request = serving_request(recipe, described.model, described.cluster, home, is_corrected=False)
    server = server_of(replace(request, rates=rates_for(by)), recipe.layout)
    return RunTime(
        name=name,
        measured_s=mean.gap_s,
        planned=parts_of_mean_step(server.replica, mean, request.serve.max_tokens_per_step),
    )


def parts_of_mean_step(replica: Replica, mean: MeanStep, budget: int) -> Mapping[str, float]:
    """Its decodes, and what chunks of prompts add to them, as often as they come."""
    context = max(1, round(mean.tokens_in + mean.tokens_out / 2))
    running = max(1, round(mean.running / replica.split.pp))  # stages work on different requests
    decodes = Group(count=running, queries=1, keys=context)
    alone = replica.step([decodes]).parts()
    chunk = min(budget, round(mean.computed))
    if chunk < 1 or mean.tokens_out <= 0:
        return alone
    prompts = Group(count=1, queries=chunk, keys=max(chunk, round(mean.tokens_in), 2))
    both = replica.step([decodes, prompts]).parts()
    chunks = running * mean.computed / mean.tokens_out / chunk
    return {part: alone[part] + chunks * (both[part] - alone[part]) for part in PARTS}

"""`armillary simulate --replay LOG`: an autoscaler's logged signals, decided again."""

from __future__ import annotations

from pathlib import Path

from armillary.cli.output import Output
from armillary.errors import BadInput
from armillary.units import seconds_text

_SHOWN = 30


def replay_log(out: Output, log: Path, recipe: Path | None, overrides: tuple[str, ...]) -> None:
    """With the logged policy, a recipe's, or one with some keys changed; decisions that differ are listed."""
    from armillary.fleet.autoscale.decision_log import AutoscalerStart, read_log, replay
    from armillary.spec.recipe import read_tables, recipe_from_dict
    from armillary.spec.toml.fields import to_plain

    lines = read_log(log)
    first = next((line for line in lines if isinstance(line, AutoscalerStart)), None)
    base = {} if first is None else to_plain(first.settings)
    tables = {"autoscale": base} if recipe is None else {"autoscale": read_tables(recipe).get("autoscale", base)}
    if any(not text.startswith("autoscale.") for text in overrides):
        raise BadInput("a log is replayed with other keys of [autoscale] alone, like --set autoscale.cooldown_s=60")
    settings = recipe_from_dict({"model": {"name": "logged"}, **tables}, overrides).autoscale
    decisions = list(replay(lines, settings))
    rows = [
        [seconds_text(then.signals.now - decisions[0][0].signals.now), then.decision.replicas, now.replicas, now.reason]
        for then, now in decisions
        if then.decision.replicas != now.replicas
    ]
    out.say(f"{len(decisions):,} decisions, {len(rows):,} of them differ")
    if rows:
        out.table("", ["at", "logged", "replayed", "reason"], rows[:_SHOWN])
    answer = [
        {"logged": then.decision.plain(), "replayed": now.plain(), "signals": vars(then.signals)}
        for then, now in decisions
    ]
    out.result({"decisions": answer, "different": len(rows)}, quiet=str(len(rows)))

"""Time of an engine step, fitted to the steps of a run: linear in its tokens, keys and (query, key) pairs.

    seconds = base + prompts·p + mixed·m + tokens·b + context·d + pairs·e + rows·r + past·q + drawn·s
              + Σ decodesᵢ·cᵢ + Σ prefillᵢ·fᵢ,  all ≥ 0

`prompts` is 1 where a step has prefill (whose kernels are launched one by one), `mixed` is 1 where it has prefill and
decodes, whose attention is computed separately. `rows` counts prefill chunks, for each of which a CPU calls its
operators; `past` counts their earlier tokens, `drawn` the tokens that are drawn at a temperature. A decode goes through
the same GEMMs as a prompt token, so it costs at least as much. What more decodes and prompt tokens cost depends on how
many there are: `decodesᵢ` and `prefillᵢ` count those between two sizes (step_columns.py). Where the host waits for a
device, the host's part of a step and the wait are fitted separately.

The fit is robust non-negative least squares on relative errors: steps far off the line (a cold start, another process)
count less (Huber, 1964). scipy's `least_squares(loss="huber")` does not replace the loop of reweighted `nnls`, because
the scale of the errors is estimated anew in every round, and per kind of step. Where the steps of a run are too alike
to determine a coefficient, the engine's calibration steps do, rescaled to the speed of the run; without them, a ridge
prior (Hoerl and Kennard, 1970) shares the time between the coefficients, base and tokens first, and weighs more the
noisier the steps are. With few steps, the planner's roofline takes the place of the fit, scaled to the steps there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from armillary.planning.device_model.vectorised_layouts import Array
from armillary.planning.simulation.step_columns import PAST, ROWS, SEGMENTS, TOKENS, Corners, corners_of, step_columns
from armillary.planning.simulation.step_cost import StepCost, step_noise

if TYPE_CHECKING:
    from armillary.spec.plan import Plan

Calibration = tuple[Array, Array]
"""calibration steps: their columns and seconds"""
QUERY_TILE = 64
"""queries of a head per thread block of prefill attention"""
LEAST_STEPS, LEAST_CALIBRATION = 12, 8
"""fewer steps do not determine so many coefficients; calibration steps are all of different kinds"""
_MOST_STEPS = 4000
"""more steps do not improve the fit"""
_ROUNDS = 8
_MOST_RIDGE, _NOISY = 0.01, 0.1
"""weight of the prior, and the noise of steps from which on it counts fully"""


class Prior(NamedTuple):
    """Ridge prior of the coefficients."""

    penalty: Array
    """per coefficient: base, prompts, mixed, tokens, context, pairs, rows, past, drawn, decodes, prefill"""
    power: int
    """exponent of the noise in the prior's weight"""
    by_kind: bool = False
    """errors are compared within steps with and without prefill, so that the rarer kind is no outlier"""
    neighbours: Sequence[tuple[int, int]] = ()
    """coefficients that are about the same where no steps tell them apart"""

    def over(self, corners: Corners) -> Prior:
        """With a penalty for each segment."""
        fixed, (decodes, prefill) = self.penalty[:SEGMENTS], self.penalty[SEGMENTS:]
        segments = [[decodes] * (len(corners.decodes) + 1), [prefill] * (len(corners.prefill) + 1)]
        return self._replace(penalty=np.concatenate([fixed, *segments]), neighbours=corners.neighbours())


_DEVICE = Prior(np.array([1.0, 6.0, 3.0, 1.0, 4.0, 2.0, 4.0, 6.0, 6.0, 4.0, 4.0]), 4)
"""device time: base and tokens first, then the rest"""
_HOST = Prior(np.array([1.0, 1.0, 4.0, 4.0, 8.0, 8.0, 4.0, 8.0, 8.0, 4.0, 4.0]), 4, by_kind=True)
"""host time beside a device: kernel launches, whose number hardly depends on tokens"""
_ALONE = Prior(np.array([1.0, 12.0, 12.0, 1.0, 6.0, 2.0, 2.0, 6.0, 6.0, 4.0, 4.0]), 3)
"""a CPU, busy all along: operator calls per row and GEMMs per token. That a step has prefill at all costs nothing more,
although in a run of similar steps it could seem so"""
_CALIBRATION_WEIGHT = 0.1
"""weight of all calibration steps over that of the run's: enough for coefficients that the run does not determine"""
_TRACE_OF_RIDGE = 1e-12
"""relative ridge that makes the solution unique where columns are the same"""
_STALL = 3.0
"""a step that took this many times the expected time was delayed by something else"""
_HUBER_LIMIT = 1.345
"""residuals beyond so many deviations count less: 95 % efficiency for normal errors (Huber)"""
_EVEN = 0.02
"""weight of slopes that are the same in neighbouring segments, over that of the steps; it only matters where few steps
are beyond a corner"""
_WARM_UP = 2
"""first steps are left out where there are enough: kernels are chosen and memory is first touched in them"""


def least_queries(plan: Plan | None) -> float:
    """Prefill tokens from which on every SM of a GPU has a tile of some head's queries; 0 on other chips."""
    chip = plan.cluster.chip if plan is not None else None
    if plan is None or chip is None or chip.kind != "gpu" or not chip.num_sms:
        return 0.0
    return chip.num_sms * QUERY_TILE / max(1, plan.model.heads // plan.layout.tp)


def fit_step_cost(
    steps: Sequence[Mapping[str, Any]], *, calibration: Sequence[Mapping[str, Any]] = (), least: float = 0.0
) -> StepCost | None:
    """Fit to a run's step records, and to `calibration` steps where those do not determine a coefficient; none where
    there are too few steps. `least` is `least_queries`."""
    known = [
        step for step in steps if "engine_step_s" in step and step["engine_step_s"] > 0 and "decode_tokens" in step
    ]
    known = known[_WARM_UP:] if len(known) >= LEAST_STEPS + _WARM_UP else known
    if len(known) < LEAST_STEPS:
        return None
    known = known[:: -(-len(known) // _MOST_STEPS)]
    corners = corners_of(known, calibration)
    parts, taken = step_columns(known, least, corners), np.array([float(step["engine_step_s"]) for step in known])
    waited = np.array([float(step.get("engine_wait_s", 0.0)) for step in known])
    waits = float(waited.sum()) > 0.5 * float(taken.sum())
    calibrated = _calibration(calibration, least, corners)
    coefficients = _line(parts, taken, waited if waits else None, calibrated, corners)
    if coefficients[PAST] > coefficients[TOKENS]:  # a key takes no longer to read than to compute: some steps stalled
        without_past = np.arange(len(coefficients)) != PAST
        bare = None if calibrated is None else (calibrated[0] * without_past, calibrated[1])
        coefficients = _line(parts * without_past, taken, waited if waits else None, bare, corners)
    error = float(np.median(np.abs(parts @ coefficients - taken) / taken))
    coefficients *= _mean_ratio(parts @ coefficients, taken)
    ratios = np.clip(taken / np.maximum(parts @ coefficients, 1e-12), 1 / _STALL, _STALL)
    base_s, prompt_s, mixed_s, token_s, context_s, pair_s, row_s, past_s, draw_s = map(float, coefficients[:SEGMENTS])
    decode_s, decode_bends, prefill_s, prefill_bends = corners.slopes(coefficients[SEGMENTS:])
    return StepCost(
        base_s=base_s,
        prompt_s=prompt_s,
        mixed_s=mixed_s,
        prefill_s=token_s + prefill_s,
        prefill_bends=prefill_bends,
        decode_s=token_s + decode_s,
        decode_bends=decode_bends,
        context_s=context_s,
        pair_s=pair_s,
        row_s=row_s,
        past_s=past_s,
        draw_s=draw_s,
        least_queries=least,
        waits=waits,
        error=error,
        steps=len(known),
        noise=step_noise(zip(map(bool, parts[:, 1]), parts @ coefficients, ratios, strict=True)),
        basis=f"fitted to {len(known)} steps, ± {error:.0%} each"
        + (f", {len(calibrated[1])} calibrated" if calibrated else ""),
    )


def _line(parts: Array, taken: Array, waited: Array | None, calibrated: Calibration | None, corners: Corners) -> Array:
    """Coefficients of the steps' seconds; the wait for a device is fitted separately, unless calibration steps tell
    both apart."""
    if waited is None or calibrated is not None:
        return _fitted(parts, taken, taken, (_ALONE if waited is None else _DEVICE).over(corners), calibrated)
    device, host = _DEVICE.over(corners), _HOST.over(corners)
    return _fitted(parts, waited, taken, device) + _fitted(parts, taken - waited, taken, host)


def _mean_ratio(predicted: Array, taken: Array) -> float:
    """Sum of measured over sum of fitted seconds, so that totals are right although noise is skewed; a delayed step
    counts with at most `_STALL` times its fitted seconds."""
    total = float(predicted.sum())
    return float(np.minimum(taken, _STALL * np.maximum(predicted, 1e-12)).sum()) / total if total else 1.0


def _calibration(calibration: Sequence[Mapping[str, Any]], least: float, corners: Corners) -> Calibration | None:
    known = [step for step in calibration if step.get("calibration_step_s", 0.0) > 0]
    if len(known) < LEAST_CALIBRATION:
        return None
    return step_columns(known, least, corners), np.array([float(step["calibration_step_s"]) for step in known])


def _fitted(parts: Array, wanted: Array, taken: Array, prior: Prior, calibrated: Calibration | None = None) -> Array:
    """Coefficients for `wanted`, all or part of the steps' seconds; the noisier they are, the more the prior counts."""
    if calibrated is not None:
        return _robust(parts, wanted, taken, prior, 0.0, _rescaled_to_run(parts, wanted, prior, calibrated))
    freely = _robust(parts, wanted, taken, prior, 0.0)
    noise = float(np.median(np.abs(parts @ freely - wanted) / taken))
    return _robust(parts, wanted, taken, prior, _MOST_RIDGE * min(1.0, noise / _NOISY) ** prior.power)


def _rescaled_to_run(parts: Array, wanted: Array, prior: Prior, calibrated: Calibration) -> Calibration:
    """Calibration steps with the seconds they would have in the run, where caches are colder and the host does more."""
    columns, seconds = calibrated
    expected = parts @ _robust(columns, seconds, seconds, prior, 0.0)
    return columns, seconds * float(np.median(wanted / np.maximum(expected, 1e-12)))


def _robust(
    parts: Array, wanted: Array, taken: Array, prior: Prior, ridge: float, calibrated: Calibration | None = None
) -> Array:
    """Non-negative least squares of relative errors, reweighted in rounds so that outliers count less."""
    weights, usual = np.ones(len(taken)), float(np.median(taken))
    more = _weighed(calibrated, usual, parts.shape)
    size = np.concatenate([[1.0, 1.0, 1.0], parts[:, 3:].mean(axis=0)])
    size[ROWS] /= max(parts[:, 1].mean(), 1e-12)  # rows too: what only some steps have counts as if all had it
    believed = np.vstack([np.diag(prior.penalty * size / usual) * np.sqrt(ridge), _even(parts, usual, prior)])
    believed *= np.sqrt(len(taken))
    kinds = parts[:, 1] if prior.by_kind else np.zeros(len(taken))
    coefficients = np.zeros(parts.shape[1])
    for _ in range(_ROUNDS):
        scale = np.sqrt(weights / (taken * usual))  # between absolute and relative errors: long steps count more
        rows = np.vstack([parts * scale[:, None], believed, more[0]])
        before, coefficients = (
            coefficients,
            _non_negative(rows, np.concatenate([wanted * scale, np.zeros(len(believed)), more[1]])),
        )
        errors = np.abs(parts @ coefficients - wanted) / np.sqrt(taken * usual)
        weights = np.minimum(1.0, _HUBER_LIMIT * _spread(errors, kinds) / np.maximum(errors, 1e-15))
        if np.allclose(before, coefficients, rtol=1e-6, atol=0.0):
            break
    return coefficients


def _even(parts: Array, usual: float, prior: Prior) -> Array:
    """Rows that say that one more costs as much in one segment as in the next, as far as few steps tell them apart: by
    the seconds that the difference makes in the step with the most beyond the corner."""
    rows = np.zeros((len(prior.neighbours), parts.shape[1]))
    for row, (left, right) in zip(rows, prior.neighbours, strict=True):
        reach = max(1.0, float(parts[:, right].max()))
        row[left], row[right] = -_EVEN * reach / usual, _EVEN * reach / usual
    return rows


def _weighed(calibrated: Calibration | None, usual: float, shape: tuple[int, ...]) -> Calibration:
    """Weighted rows of the calibration steps, beside so many (steps, columns) of the run."""
    count, width = shape
    if calibrated is None:
        return np.zeros((0, width)), np.zeros(0)
    columns, seconds = calibrated
    scale = np.sqrt(_CALIBRATION_WEIGHT * count / len(seconds)) / np.sqrt(np.maximum(seconds, 1e-12) * usual)
    return columns * scale[:, None], seconds * scale


def _spread(errors: Array, kinds: Array) -> Array:
    """Robust standard deviation (1.4826 · median) of the errors of each step's kind."""
    spread = np.empty(len(errors))
    for kind in np.unique(kinds):
        spread[kinds == kind] = 1.4826 * float(np.median(errors[kinds == kind])) or 1e-12
    return spread


def _non_negative(rows: Array, wanted: Array) -> Array:
    """Non-negative least squares, with columns scaled to one size so that none is lost to rounding. A trace of ridge
    makes the solution unique where columns are the same."""
    from scipy.optimize import nnls  # slow to import

    size = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    scaled = rows / size
    ridge = np.diag(np.sqrt(_TRACE_OF_RIDGE) * np.linalg.norm(scaled, axis=0))
    return nnls(np.vstack([scaled, ridge]), np.concatenate([wanted, np.zeros(len(size))]))[0] / size

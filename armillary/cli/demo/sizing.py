"""How large the demo is: model, batch, steps and traffic, from what this machine was measured to reach.

The demo must end within five minutes on two slow cores as on a data-centre GPU, and still train for more than a minute.
So the planner prices a few sizes with the measured ceilings; nothing here looks at the name of a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, log10

from armillary.cli.demo.state import RECIPE, DemoState
from armillary.errors import ArmillaryError
from armillary.machine.machine import here
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.serving.deployment_options import server_of
from armillary.planning.serving.queueing import Server
from armillary.planning.serving.serving_plan import serving_request
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.resolve_recipe import resolve
from armillary.spec.recipe import Recipe, load_recipe

TRAIN_S = 85.0
"""intended training time: above a minute also where the plan is a quarter too slow"""
ENOUGH_STEPS, LEAST_STEPS = 100, 30
"""steps from which a larger model is chosen, and the fewest steps of the smallest one"""
QUARTERS = 4
"""validations and recordings per run; the run with a lever applied is as long as one of these intervals"""
BUSY = 0.4
"""share of time in which the server has requests: few overlap, so that latencies follow from the plan's steps and not
from a queue, which would multiply every error of the plan"""
LOAD_S = 20.0
"""duration of the load"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model of the catalogue, and the tokens per sequence and per step that it is trained with."""

    model: str
    sequence: int
    batch_tokens: int

    def overrides(self) -> tuple[str, ...]:
        return (
            f"model.name={self.model}",
            f"train.sequence={self.sequence}",
            f"train.batch_tokens={self.batch_tokens}",
        )


SIZES = (
    Size(model="armillary-125m", sequence=512, batch_tokens=32_768),
    Size(model="armillary-25m", sequence=256, batch_tokens=8_192),
    Size(model="armillary-5m", sequence=128, batch_tokens=8_192),
    Size(model="armillary-5m", sequence=128, batch_tokens=2_048),
)
"""largest first; all have at least 4 M parameters with the recipe's vocabulary"""


def fit(state: DemoState) -> None:
    """Size the demo so that this machine finishes it in time; the user's overrides stay."""
    given = state.overrides
    size, steps = choose(SIZES, lambda candidate: step_s(state, (*candidate.overrides(), *given)))
    each = max(1, steps // QUARTERS)
    lengths = (f"train.steps={steps}", f"train.eval_every={each}", f"train.profile_every={each}")
    state.resize((*size.overrides(), *lengths, *given))
    state.resize((*size.overrides(), *lengths, *traffic(state), *given))
    state.out.say(
        f"the demo's size by these: {state.recipe.model.source}, {state.recipe.train.steps:,} steps, "
        f"{state.recipe.traffic.requests_per_s:g} requests/s"
    )


def choose(sizes: Sequence[Size], price: Callable[[Size], float]) -> tuple[Size, int]:
    """(size, steps): the largest that leaves enough steps in the time, else the smallest with the steps there are."""
    for size in sizes:
        if (steps := round(TRAIN_S / price(size))) >= ENOUGH_STEPS:
            return size, steps
    return sizes[-1], max(LEAST_STEPS, round(TRAIN_S / price(sizes[-1])))


def step_s(state: DemoState, overrides: Sequence[str]) -> float:
    """Predicted seconds of a step; infinite where it does not fit or has no valid layout."""
    recipe = load_recipe(RECIPE, overrides)
    try:
        problem = resolve(recipe, recipe.model_config(), recipe.cluster(here()), state.home)
        prediction = predict(problem.case, as_arrays([problem.layout]))
    except ArmillaryError:
        return float("inf")
    return float(prediction.time.total[0]) if bool(prediction.fits[0]) else float("inf")


# --- traffic


def traffic(state: DemoState) -> tuple[str, ...]:
    """Requests per second that keep the server BUSY, and objectives that the lever decides about."""
    recipe: Recipe = state.recipe
    request = serving_request(recipe, recipe.model_config(), recipe.cluster(here()), state.home)
    server = server_of(request, recipe.layout)
    return (
        f"traffic.requests_per_s={rounded(BUSY / answer_s(server))}",
        f"traffic.duration_s={LOAD_S}",
        f"objective.e2e_p99_s={rounded(3 * answer_s(server))}",
        f"objective.ttft_p99_s={rounded(server.alone_s)}",
        f"objective.itl_p99_s={rounded(6 * server.decode_s(1) + server.alone_s)}",
    )


def answer_s(server: Server) -> float:
    """Seconds of one request that has the server to itself."""
    return server.alone_s + (server.traffic.tokens_out - 1) * server.decode_s(1)


def rounded(value: float) -> float:
    """Two significant figures."""
    return round(value, 1 - floor(log10(value)))

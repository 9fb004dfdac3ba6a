"""Load of a server by its metrics page alone, and its load with another batch size or more replicas.

A page has no steps to replay, so this is arithmetic on its means. A step of n requests lasts s(n) = s + b·(n − R)·(1 +
prompt tokens / output tokens), where R requests run now, s is the inter-token latency now and b the prefill time per
prompt token. R + W requests are in the system, so by Little's law their time is proportional to
1 / throughput = output tokens · s(n) / n.
"""

from dataclasses import dataclass
from math import inf

from armillary.diagnosis.readings.reading import Reading


@dataclass(frozen=True, kw_only=True)
class Load:
    """Means of a page for one replica."""

    running: float
    waiting: float
    queue_s: float  # a request's time before it is scheduled
    prefill_s: float | None  # from there to its first token; None where the page does not tell it from waiting
    decode_s: float  # from there to its last
    gap_s: float  # inter-token latency
    usual_gap_s: float  # that of steps without prefill, where the page tells the two kinds apart; else the median
    computed: float  # prompt tokens per request that had to be computed
    tokens_in: float  # prompt tokens per request
    tokens_out: float  # output tokens per request
    preempted: float  # preemptions per request
    demand: float  # requests that arrived since the start per finished request
    step_tokens: float = 0.0  # tokens per step, where the page says
    step_prompts: float = 0.0  # prompt tokens among them, where the page says
    parted: bool = False  # whether the page tells inter-token latencies of steps with prefill from those without
    full_step: float = inf  # tokens of its fullest steps, where the page says
    over: bool = False  # whether all requests have finished: means over that time stand for running and waiting

    @property
    def e2e_s(self) -> float:
        return self.ttft_s + self.decode_s

    @property
    def ttft_s(self) -> float:
        return self.queue_s + (self.prefill_s or 0.0)

    @property
    def prompt_token_s(self) -> float:
        """What one more token in a step costs: what a mean step takes beyond one without prompts, over its prompt
        tokens; where the page does not tell, at most the prefill's time beyond a step of decodes, over its tokens.
        At most what all the engine's time gives each of its tokens; that, where no prefill was timed."""
        tokens = self.computed + self.tokens_out + self.recomputed
        most = self.engine_s / tokens if tokens > 0 else 0.0
        if self.parted and self.step_prompts > 0:
            return min(most, max(0.0, self.mean_step_s - self.usual_gap_s) / self.step_prompts)
        if self.prefill_s is None or self.computed <= 0:
            return most
        return min(most, max(0.0, self.prefill_s - self.usual_gap_s) / self.computed)

    @property
    def mean_step_s(self) -> float:
        """A request's time in the batch over its steps: one for its first token, and one for each gap after."""
        return ((self.prefill_s or 0.0) + self.decode_s) / (1 + self.decode_s / self.gap_s)

    @property
    def recomputed(self) -> float:
        """Tokens per request recomputed after preemptions: each time the prompt and half of the output."""
        return self.preempted * (self.tokens_in + self.tokens_out / 2)

    @property
    def prompts_share(self) -> float:
        """Share of the engine's time spent on prefill."""
        return min(0.95, self.computed * self.prompt_token_s / self.engine_s) if self.engine_s > 0 else 0.0

    @property
    def engine_s(self) -> float:
        """Engine time per request: its time in the batch, shared with the other requests in it."""
        return ((self.prefill_s or 0.0) + self.decode_s) / max(1.0, self.running)

    @property
    def recompute_share(self) -> float:
        """Share of the engine's time that recomputes tokens after preemptions."""
        return min(0.9, self.recomputed * self.prompt_token_s / self.engine_s) if self.engine_s > 0 else 0.0

    def step_s(self, batch: float) -> float:
        """Seconds of a step with `batch` requests."""
        tokens = 1 + self.computed / self.tokens_out if self.tokens_out > 0 else 1.0
        return max(0.1 * self.gap_s, self.gap_s + self.prompt_token_s * (batch - self.running) * tokens)

    def throughput(self, batch: float, replicas: int = 1) -> float:
        """Output tokens per second with at most `batch` requests per replica and as many in the system as now."""
        inside = min(batch, (self.running + self.waiting) / replicas)
        return replicas * inside / self.step_s(inside)

    def gain(self, batch: float, replicas: int = 1) -> float:
        """Throughput after over before, which by Little's law is a request's time before over after."""
        return self.throughput(batch, replicas) / self.throughput(self.running)

    def fuller_steps(self, times: float) -> float:
        """Gain from steps with `times` as many tokens where every step is full: the fixed cost of a step is paid less
        often."""
        full = self.gap_s + (times - 1) * self.step_tokens * self.prompt_token_s
        return times * self.gap_s / max(self.gap_s, full)


def load_of(reading: Reading) -> Load | None:
    """None where the page does not say how many run and how long requests take."""
    running, waiting = reading.get("running"), reading.get("waiting") or 0.0
    gap = reading.get("itl_s") or reading.get("tpot_s")
    if running is None or gap is None or gap <= 0:
        return None
    replicas = max(1.0, reading.get("replicas") or 1.0)
    out, prompt = reading.get("tokens_out") or 1.0, reading.get("tokens_in") or 0.0
    queue, prefill, decode = _times(reading, gap, out)
    hit = reading.get("prefix_hit_fraction") or 0.0
    requests = reading.get("requests_total") or 0.0
    came = requests + reading.values.get("unanswered", running + waiting)
    prompts, alone = reading.get("prefill_tokens") or 0.0, reading.values.get("decode_gap_s")
    total_preempted = (reading.get("preemptions_total") or 0.0) / requests if requests else 0.0
    return Load(
        running=max(1.0, running / replicas),
        waiting=waiting / replicas,
        queue_s=queue,
        prefill_s=prefill,
        decode_s=decode,
        gap_s=gap,
        usual_gap_s=min(gap, alone or reading.get("itl_p50_s") or gap),
        tokens_in=prompt,
        computed=prompt * (1 - hit),
        tokens_out=out,
        # between two scrapes where that is known, else since the start
        preempted=reading.values.get("preemptions_per_request", total_preempted),
        demand=came / requests if requests else 1.0,
        step_tokens=prompts + (reading.get("decode_tokens") or 0.0),
        step_prompts=prompts,
        parted=bool(alone),
        full_step=reading.values.get("full_step_tokens", inf),
        over="unanswered" in reading.values,
    )


def _times(reading: Reading, gap: float, out: float) -> tuple[float, float | None, float]:
    """Queue, prefill and decode seconds of a mean request. A queue that was not timed gets its share of the total by
    Little's law, W / (R + W), and then the prefill is not known."""
    queue, ttft, e2e, prefill, decode = (
        reading.get(name) for name in ("queue_s", "ttft_s", "e2e_s", "prefill_s", "decode_s")
    )
    if decode is None:
        decode = e2e - ttft if e2e is not None and ttft is not None and e2e > ttft else gap * max(0.0, out - 1)
    first = ttft if ttft is not None else max(0.0, (e2e or decode) - decode)
    if queue is not None:
        return queue, prefill if prefill is not None else max(0.0, first - queue), decode
    running, waiting = reading.get("running") or 0.0, reading.get("waiting") or 0.0
    if waiting <= 0:
        return 0.0, prefill if prefill is not None else first, decode
    return min(first, (first + decode) * waiting / (running + waiting)), prefill, decode

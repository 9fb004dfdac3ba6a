"""Who may ask for what now: the key of a request, its models and scopes, its limits and budgets."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from armillary.fleet.gateway.body import RequestBody
from armillary.fleet.gateway.budgets import USD, budget_charges, to_units
from armillary.fleet.gateway.gateway_config import ModelSettings
from armillary.fleet.gateway.keys import ApiKey, KeyRing
from armillary.fleet.gateway.limits import Charge, Limiter, Refusal
from armillary.fleet.gateway.redis.limits import LimiterUnavailable
from armillary.fleet.gateway.token_usage import TokenUsage
from armillary.serving.http.problem import Problem

Headers = Mapping[bytes, bytes]
NO_KEY = "the API key is missing, wrong or expired; send a valid one as Authorization: Bearer KEY"


@dataclass(slots=True)
class Reservation:
    """What a request has reserved; `max_tokens` is what each of its choices may have."""

    request: str
    charges: list[Charge] = field(default_factory=list)
    max_tokens: int | None = None
    tokens: int = 0  # the most that it may take, where a limit or budget of tokens or dollars counts
    usd: float = 0.0


class Admission:
    """Checks keys and limits; without a file of keys, a gateway serves everybody."""

    def __init__(self, keys: KeyRing, limiter: Limiter, *, allow_uncounted: bool = False) -> None:
        """`allow_uncounted`: serve requests with limits while the limiter is not available."""
        self._keys, self._limiter, self._allow_uncounted = keys, limiter, allow_uncounted
        self._name, self._numbers = secrets.token_hex(12), count()  # apart from all other gateways

    def key_of(self, headers: Headers, scope: str = "inference") -> ApiKey | None:
        """The key of a request; Problem 401 or 403 where it may not pass."""
        self._keys.refresh()
        if not self._keys.required:
            return None
        given = headers.get(b"authorization", b"")
        secret = given[7:].strip() if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        key = self._keys.find(secret)
        if key is None:
            raise Problem(401, NO_KEY, code="invalid_api_key")
        if scope not in key.scopes:
            raise Problem(403, f"this key lacks the scope {scope}; ask for one that has it", code="missing_scope")
        return key

    def check_model(self, key: ApiKey | None, model: str) -> None:
        if key is not None and not key.allows(model):
            raise Problem(403, f"this key may not use the model '{model}'; GET /v1/models lists its own", param="model")

    async def reserve(
        self, key: ApiKey | None, body: RequestBody, models: Sequence[ModelSettings], *, free: bool = False
    ) -> Reservation:
        """Reserve a request and its tokens (none where it is `free` of them); Problem 429 where a limit or budget is
        reached. `models` are the one that was asked for and its fallbacks, the dearest of which counts."""
        reservation = Reservation(f"{self._name}-{next(self._numbers)}")  # not the client's id, which it may use twice
        if key is None:
            return reservation
        limits, bucket, charges = key.limits_of(body.model), f"{key.id}:{body.model}", reservation.charges
        if limits.requests is not None:
            charges.append(Charge(f"{bucket}:requests", 1, limits.requests, limits.window_s))
        if (limits.tokens is not None or key.budget.is_set) and body.uses_model and not free:
            _bound(reservation, body, models)
            if limits.tokens is not None:
                _check_size(reservation.tokens, limits.tokens)
                charges.append(Charge(f"{bucket}:tokens", reservation.tokens, limits.tokens, limits.window_s))
            charges += budget_charges(key, reservation.tokens, reservation.usd)
        if charges:
            await self._reserve(reservation)
        return reservation

    async def _reserve(self, reservation: Reservation) -> None:
        try:
            refusal = await self._limiter.reserve(reservation.request, reservation.charges)
        except LimiterUnavailable:
            if not self._allow_uncounted:
                text = "limits cannot be counted now; try again in a moment"
                raise Problem(503, text, code="limiter_unavailable", retry_after_s=2) from None
            reservation.charges.clear()
            return
        if refusal is not None:
            raise _over(refusal)

    async def correct(self, reservation: Reservation, usage: TokenUsage | None, usd: float) -> None:
        """Return what was reserved and not used; all stays where the response had no counts, and budgets forget the
        request."""
        if not reservation.charges or (usage is None and all(each.ends_at is None for each in reservation.charges)):
            return
        used = {} if usage is None else {"tokens": usage.prompt + usage.completion, "usd": to_units(usd)}
        costs = [used.get(_kind(charge), charge.cost) for charge in reservation.charges]
        try:
            await self._limiter.correct(reservation.request, reservation.charges, costs)
        except LimiterUnavailable:
            return

    async def cancel(self, reservation: Reservation) -> None:
        """Return everything: no replica has worked on the request."""
        if reservation.charges:
            try:
                await self._limiter.correct(reservation.request, reservation.charges, [0] * len(reservation.charges))
            except LimiterUnavailable:
                return


def _bound(reservation: Reservation, body: RequestBody, models: Sequence[ModelSettings]) -> None:
    """The most tokens and dollars of a request."""
    model, completion = models[0], 0
    if body.generates:
        reservation.max_tokens = model.default_max_tokens if body.max_tokens is None else body.max_tokens
        completion = reservation.max_tokens * body.choices
    prompt = body.most_prompt_tokens(model.bytes_per_token, model.template_tokens)
    reservation.tokens = prompt + completion
    reservation.usd = max(each.usd(prompt, completion) for each in models)


def _check_size(tokens: int, limit: int) -> None:
    if tokens > limit:
        raise Problem(
            400,
            f"prompt and max_tokens may take {tokens:,} tokens, and this key's limit is {limit:,}; "
            "lower max_tokens or shorten the prompt",
            code="token_limit_exceeded",
        )


def _kind(charge: Charge) -> str:
    """requests, tokens or usd."""
    return charge.bucket.rpartition(":")[2]


def _over(refusal: Refusal) -> Problem:
    charge, kind = refusal.charge, _kind(refusal.charge)
    if charge.ends_at is not None:
        amounts = [
            f"${each / USD:.2f}" if kind == "usd" else f"{each:,} tokens" for each in (charge.limit, charge.cost)
        ]
        text = f"this key's budget of {amounts[0]} leaves too little for this request, which may take {amounts[1]}"
        more = f"lower max_tokens, or wait until the budget begins anew in {refusal.retry_after_s / 3600:.1f} h"
        return Problem(429, f"{text}; {more}", code="insufficient_quota", retry_after_s=refusal.retry_after_s)
    return Problem(
        429,
        f"the limit of {charge.limit:,} {kind} per {charge.window_s:g} s is reached; try again in "
        f"{max(1, round(refusal.retry_after_s))} s",
        code="rate_limit_exceeded",
        retry_after_s=refusal.retry_after_s,
    )

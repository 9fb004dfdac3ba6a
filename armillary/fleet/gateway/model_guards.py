"""The guards of one model: its checks, built once, and what they count.

Safety SLOs are kept over the last thousand checked requests: the share that was blocked, the share of answers that
refuse, and the mean time of checks.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Sequence
from dataclasses import replace

from armillary.fleet.gateway.body import RequestBody
from armillary.fleet.gateway.remote_checks import remote_check
from armillary.fleet.guards.guard_config import GuardSettings
from armillary.fleet.guards.guard_verdict import Blocked
from armillary.fleet.guards.guarded_prompt import guarded_prompt
from armillary.fleet.guards.guarded_response import GuardedStream, guarded_response
from armillary.fleet.guards.injection import injection
from armillary.fleet.guards.patterns import PERSONAL_KINDS, deny_list, patterns, personal_data
from armillary.fleet.guards.text_stream import NamedCheck, checked
from armillary.serving.http.problem import Problem, bad_request

GUARDED_PATHS = ("/v1/chat/completions", "/v1/completions")
_LAST = 1000
_BEGINNING = 4000
"""bytes of an answer in which a refusal is looked for"""
_REFUSAL = re.compile(
    r'"(?:content|text)":\s?"\s*(?:I\'m sorry|I am sorry|Sorry)?[,.]?\s*(?:but\s*)?'
    r"(?:I(?:\'m| am) (?:not able|unable) to|I (?:can\'t|cannot|can not|won\'t))",
    re.IGNORECASE,
)


class ModelGuards:
    """Checks of one model."""

    def __init__(self, settings: Sequence[GuardSettings]) -> None:
        checks = [(each, _named(each)) for each in settings]
        self._input = [check for each, check in checks if each.on != "output"]
        self._output = [check for each, check in checks if each.on != "input" and each.kind != "injection"]
        self.verdicts: Counter[tuple[str, str, str]] = Counter()  # guard, input or output, verdict
        self._requests: deque[tuple[bool, bool]] = deque(maxlen=_LAST)  # blocked, refused by the model
        self._seconds: deque[float] = deque(maxlen=_LAST)

    @property
    def checks_output(self) -> bool:
        return bool(self._output)

    async def check_input(self, body: RequestBody) -> RequestBody:
        """The body as a replica may see it; Problem 400 where a check blocks it."""
        if self.checks_output and body.generates and body.path not in GUARDED_PATHS:
            raise bad_request(f"answers of this model are checked, which {body.path} cannot be; use {GUARDED_PATHS[0]}")
        begin = time.perf_counter()

        async def change(text: str) -> str:
            text, masks = await checked(text, self._input)
            self._count("input", masks)
            return text

        try:
            return replace(body, table=await guarded_prompt(body.table, change)) if self._input else body
        except Blocked as blocked:
            self.verdicts[blocked.guard, "input", "block"] += 1
            self._requests.append((True, False))
            text = f"the request was blocked by the {blocked.guard} check ({blocked.reason}); change its text"
            raise Problem(400, text, code="content_filter") from None
        finally:
            self._seconds.append(time.perf_counter() - begin)

    def stream(self) -> CheckedStream:
        return CheckedStream(self, GuardedStream(self._output))

    async def check_response(self, data: bytes) -> bytes:
        """A complete response as a client may see it."""
        begin = time.perf_counter()
        shown, masks, blocked = await guarded_response(data, self._output)
        self.ended(masks, blocked, shown[:_BEGINNING], time.perf_counter() - begin)
        return shown

    def ended(self, masks: dict[str, int], blocked: Blocked | None, beginning: bytes, seconds: float) -> None:
        """Count the checks of a response; `beginning` is that of what the client saw."""
        self._seconds.append(seconds)
        self._count("output", masks)
        if blocked is not None:
            self.verdicts[blocked.guard, "output", "block"] += 1
        refused = _REFUSAL.search(beginning.decode("utf-8", "replace")) is not None
        self._requests.append((blocked is not None, refused))

    def _count(self, stage: str, masks: dict[str, int]) -> None:
        for name, count in masks.items():
            self.verdicts[name, stage, "mask"] += count

    def slos(self) -> dict[str, float]:
        """Gauges of the last requests; empty before the first."""
        count = len(self._requests)
        if not count:
            return {}
        return {
            "guard_blocked_fraction": sum(blocked for blocked, _ in self._requests) / count,
            "guard_refusal_fraction": sum(refused for _, refused in self._requests) / count,
            "guard_s": sum(self._seconds) / max(1, len(self._seconds)),
        }


class CheckedStream:
    """The checks of one streamed response, and the time that they take."""

    def __init__(self, guards: ModelGuards, stream: GuardedStream) -> None:
        self._guards, self._stream = guards, stream
        self._beginning, self._seconds = b"", 0.0

    @property
    def blocked(self) -> bool:
        return self._stream.blocked is not None

    async def feed(self, data: bytes) -> bytes:
        """Events that may pass now."""
        return await self._timed(self._stream.feed(data))

    async def finish(self, rest: bytes) -> bytes:
        """The last events; `rest` is what the replica sent after its last complete one."""
        shown = await self._timed(self._stream.feed(rest)) if rest and not self.blocked else b""
        return shown + await self._timed(self._stream.finish())

    async def _timed(self, work: Awaitable[bytes]) -> bytes:
        begin = time.perf_counter()
        try:
            shown = await work
        finally:
            self._seconds += time.perf_counter() - begin
        self._beginning = (self._beginning + shown)[:_BEGINNING]
        return shown

    def ended(self) -> None:
        """Count its verdicts, also where the replica or the client has ended it."""
        self._guards.ended(self._stream.masks, self._stream.blocked, self._beginning, self._seconds)


def _named(settings: GuardSettings) -> NamedCheck:
    blocks = settings.action == "block"
    match settings.kind:
        case "deny":
            return NamedCheck(settings.title, blocks, spans=deny_list(settings.terms))
        case "pattern":
            return NamedCheck(settings.title, blocks, spans=patterns(settings.patterns))
        case "personal":
            return NamedCheck(settings.title, blocks, spans=personal_data(settings.kinds or PERSONAL_KINDS))
        case "injection":
            return NamedCheck(settings.title, True, spans=injection())
        case _:
            return NamedCheck(settings.title, True, text=remote_check(settings))

"""OpenTelemetry traces (the `otel` extra): a span per request with queue, prefill and decode below it.

Spans are created when a request has ended, from times that the server records anyway; the library's thread sends them.
"""

import time
from typing import Any

from armillary.serving.http.asgi import AsgiConnection
from armillary.serving.http.otlp import tracer_provider
from armillary.serving.openai.generation import Generation

_PHASES = ("queue_s", "prefill_s", "decode_s")


class Tracing:
    """Sends spans to a collector; attribute names follow OpenTelemetry's conventions for generative models."""

    def __init__(self, url: str, model: str) -> None:
        self._provider = tracer_provider(url, "serve.otlp")
        self._tracer = self._provider.get_tracer("armillary")
        self._model = model

    def record(
        self, connection: AsgiConnection, kind: str, generation: Generation | None, begin: float, status: int
    ) -> None:
        """Record a request that has ended; `begin` is monotonic time, `status` the response's."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, set_span_in_context

        end_ns = time.time_ns()
        begin_ns = end_ns - round((time.monotonic() - begin) * 1e9)
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in connection.headers.items()}
        span = self._tracer.start_span(
            f"{kind} {self._model}",
            context=extract(carrier),
            kind=SpanKind.SERVER,
            start_time=begin_ns,
            attributes=self._attributes(connection, generation, status),
        )
        at, gauges = begin_ns, {} if generation is None else generation.gauges
        for name in _PHASES:
            seconds = gauges.get(name)
            if seconds is None:
                break
            child = self._tracer.start_span(name.removesuffix("_s"), context=set_span_in_context(span), start_time=at)
            at += round(seconds * 1e9)
            child.end(at)
        span.end(end_ns)

    def _attributes(self, connection: AsgiConnection, generation: Generation | None, status: int) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "http.response.status_code": status,
            "url.path": connection.path,
            "gen_ai.request.model": self._model,
            "gen_ai.system": "armillary",
        }
        if generation is None:
            return attributes
        usage, first = generation.usage(), generation.box.times[0].first
        attributes |= {
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
        }
        return attributes if first is None else attributes | {"armillary.ttft_s": first - generation.box.begin}

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

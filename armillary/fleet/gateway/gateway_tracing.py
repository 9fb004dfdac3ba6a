"""OpenTelemetry traces of a gateway: a span per request, under that of the client and above that of the replica.

Prompts, responses and keys are not part of a span.
"""

from __future__ import annotations

from typing import Any

from armillary.fleet.gateway.proxy import Outcome
from armillary.serving.http.asgi import AsgiConnection
from armillary.serving.http.otlp import tracer_provider

_PARENT = (b"traceparent", b"tracestate")


class GatewayTracing:
    """Sends spans to a collector; attribute names follow OpenTelemetry's conventions for generative models."""

    def __init__(self, url: str) -> None:
        self._provider = tracer_provider(url, "gateway.otlp")
        self._tracer = self._provider.get_tracer("armillary.gateway")

    def begin(self, connection: AsgiConnection) -> Any:
        """The span of a request; from now on its context is what replicas get."""
        from opentelemetry.propagate import extract, inject
        from opentelemetry.trace import SpanKind, set_span_in_context

        headers = connection.headers
        given = {name.decode(): headers[name].decode("latin-1") for name in _PARENT if name in headers}
        span = self._tracer.start_span(f"gateway {connection.path}", context=extract(given), kind=SpanKind.SERVER)
        own: dict[str, str] = {}
        inject(own, context=set_span_in_context(span))
        headers.update((name.encode(), value.encode("latin-1")) for name, value in own.items())
        return span

    def end(self, span: Any, status: int, request_id: str, model: str, outcome: Outcome | None) -> None:
        from opentelemetry.trace import StatusCode

        values: dict[str, Any] = {"http.response.status_code": status, "armillary.request_id": request_id}
        values["gen_ai.request.model"] = model
        if outcome is not None:
            values |= {"armillary.replica": outcome.replica, "armillary.attempts": outcome.attempts}
            values |= {"gen_ai.response.model": outcome.model} if outcome.begun else {}
            values |= {"armillary.ttft_s": outcome.first_byte_s} if outcome.first_byte_s is not None else {}
        if outcome is not None and outcome.usage is not None:
            values["gen_ai.usage.input_tokens"] = outcome.usage.prompt
            values["gen_ai.usage.output_tokens"] = outcome.usage.completion
        span.set_attributes(values)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

"""A trace of every request for OpenTelemetry (the `otel` extra): queue, prefill and decode under the request.

Spans are made when a request is over, from times that were taken anyway, and sent by a thread of the library.
"""

from __future__ import annotations

import time
from typing import Any

from armillary.errors import BadInput, missing
from armillary.serving.http.asgi import Exchange
from armillary.serving.openai.generation import Answering

_PHASES = ("queue_s", "prefill_s", "decode_s")


class Tracing:
    """Spans to a collector; names of attributes are OpenTelemetry's for generative models."""

    def __init__(self, url: str, model: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise missing("opentelemetry", "sending traces", "otel") from None
        if not url.startswith(("http://", "https://")):
            raise BadInput(f"serve.otlp={url} is no address; give one like http://127.0.0.1:4318/v1/traces")
        self._provider = TracerProvider(resource=Resource({"service.name": "armillary"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("armillary")
        self._model = model

    def record(self, exchange: Exchange, kind: str, answering: Answering | None, begin: float, status: int) -> None:
        """A request that is over; `begin` is by the monotonic clock, `status` what is or will be answered."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, set_span_in_context

        end_ns = time.time_ns()
        begin_ns = end_ns - round((time.monotonic() - begin) * 1e9)
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers.items()}
        span = self._tracer.start_span(
            f"{kind} {self._model}",
            context=extract(carrier),
            kind=SpanKind.SERVER,
            start_time=begin_ns,
            attributes=self._attributes(exchange, answering, status),
        )
        at, gauges = begin_ns, {} if answering is None else answering.gauges
        for name in _PHASES:
            seconds = gauges.get(name)
            if seconds is None:
                break
            child = self._tracer.start_span(name.removesuffix("_s"), context=set_span_in_context(span), start_time=at)
            at += round(seconds * 1e9)
            child.end(at)
        span.end(end_ns)

    def _attributes(self, exchange: Exchange, answering: Answering | None, status: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "http.response.status_code": status,
            "url.path": exchange.path,
            "gen_ai.request.model": self._model,
            "gen_ai.system": "armillary",
        }
        if answering is None:
            return found
        usage, first = answering.usage(), answering.box.times[0].first
        found |= {
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
        }
        return found if first is None else found | {"armillary.ttft_s": first - answering.box.begin}

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

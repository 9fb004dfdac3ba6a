"""Where OpenTelemetry spans go (the `otel` extra); the library's own thread sends them."""

from __future__ import annotations

from typing import Any

from armillary.errors import BadInput, missing


def tracer_provider(url: str, setting: str) -> Any:
    """A provider whose spans go to a collector's OTLP address; `setting` is what it was given as."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise missing("opentelemetry", "sending traces", "otel") from None
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"{setting}={url} is not a URL; give one like http://127.0.0.1:4318/v1/traces")
    provider = TracerProvider(resource=Resource({"service.name": "armillary"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider

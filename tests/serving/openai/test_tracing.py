"""Traces of requests, as a collector receives them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadInput
from armillary.serving.http.asgi import AsgiConnection
from armillary.serving.openai.generation import Generation
from armillary.serving.openai.tracing import Tracing
from armillary.serving.processes.request_mailbox import Mailbox
from tests.serving.tiny import run_server

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """(its address, the spans it was sent)."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            data = self.rfile.read(int(self.headers["content-length"]))
            data = gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()
        thread.join()


class Answered(Generation):
    """An answer that is over."""

    def __init__(self) -> None:
        self.gauges = {"queue_s": 0.1, "prefill_s": 0.2, "decode_s": 0.3}
        self.box = Mailbox(1, eager=True, begin=0.0)

    def usage(self) -> dict[str, Any]:
        return {"prompt_tokens": 5, "completion_tokens": 7}


def test_a_request_is_a_span_with_its_phases_under_that_of_the_client(collector: tuple[str, list[Any]]) -> None:
    url, spans = collector
    tracing = Tracing(url, "tiny")
    scope = {"method": "POST", "path": "/v1/completions", "headers": [(b"traceparent", PARENT.encode())]}
    connection = AsgiConnection(scope, None, None)  # type: ignore[arg-type]
    tracing.record(connection, "text_completion", Answered(), 0.0, 200)
    tracing.record(connection, "text_completion", None, 0.0, 400)
    tracing.close()
    by_name = {span.name: span for span in spans}
    whole = next(span for span in spans if span.name == "text_completion tiny" and len(span.attributes) > 5)
    assert whole.trace_id.hex() == PARENT.split("-")[1] and whole.parent_span_id.hex() == PARENT.split("-")[2]
    found = {item.key: item.value for item in whole.attributes}
    assert found["gen_ai.usage.output_tokens"].int_value == 7 and found["http.response.status_code"].int_value == 200
    for name, seconds in (("queue", 0.1), ("prefill", 0.2), ("decode", 0.3)):
        span = by_name[name]
        assert span.parent_span_id == whole.span_id
        assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(seconds * 1e9)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match="is not a URL"):
        Tracing("localhost:4318", "tiny")


@pytest.mark.slow
def test_a_server_sends_traces(folder: Path, collector: tuple[str, list[Any]]) -> None:
    url, spans = collector
    with run_server(folder, "--set", f"serve.otlp={url}") as server:
        assert server.post("/v1/completions", {"prompt": "def", "max_tokens": 3})[0] == 200
        assert server.post("/v1/completions", {"prompt": "def", "suffix": "x"})[0] == 400
        server.process.terminate()
        assert server.process.wait(30) == 0
    assert {span.name for span in spans} == {"text_completion tiny", "queue", "prefill", "decode"}
    codes = [item.value.int_value for span in spans for item in span.attributes if item.key.endswith("status_code")]
    assert sorted(codes) == [200, 400]

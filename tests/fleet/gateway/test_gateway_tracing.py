"""Spans of a gateway, as a collector receives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadInput
from armillary.fleet.gateway.gateway_tracing import GatewayTracing
from tests.fleet.gateway.replicas import FakeReplica, gateway_of, scenario
from tests.serving.openai.test_tracing import PARENT, collector

__all__ = ["collector"]


def test_a_span_between_those_of_client_and_replica(tmp_path: Path, collector: tuple[str, list[Any]]) -> None:
    url, spans = collector
    heads: list[str] = []

    @scenario
    async def asks(folder: Path) -> None:
        replica = FakeReplica()
        async with gateway_of(folder, replica, gateway={"otlp": url}) as client:
            asked = {"model": "bot", "prompt": "a secret prompt"}
            assert (await client.post(asked, traceparent=PARENT)).status == 200
            assert (await client.post(asked | {"model": "nope"})).status == 404
            await client.gateway.close()
        heads.extend(replica.heads)

    asks(tmp_path)
    whole = next(span for span in spans if span.trace_id.hex() == PARENT.split("-")[1])
    assert whole.parent_span_id.hex() == PARENT.split("-")[2] and whole.name == "gateway /v1/completions"
    assert f"traceparent: 00-{whole.trace_id.hex()}-{whole.span_id.hex()}-01\r\n" in heads[0], "the replica's parent"
    found = {item.key: item.value for item in whole.attributes}
    assert found["http.response.status_code"].int_value == 200 and found["armillary.replica"].string_value == "bot/0"
    assert found["gen_ai.usage.output_tokens"].int_value == 3
    assert len(spans) == 2 and "secret" not in str(spans), "refused requests have one too"


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match=r"gateway\.otlp=localhost:4318 is not a URL"):
        GatewayTracing("localhost:4318")

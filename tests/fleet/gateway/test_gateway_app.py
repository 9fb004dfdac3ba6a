"""The gateway as clients meet it: paths, ids, CORS, hostile requests over a real socket, streams with a pause."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import ArmillaryError
from armillary.fleet.gateway.body import decode
from armillary.fleet.gateway.gateway_config import GatewayConfig, load_config
from armillary.fleet.gateway.keys import KeyFile
from armillary.serving.http.server import ListenOptions, Tls, bind, http_server
from armillary.spec.toml.fields import build
from tests.fleet.gateway.replicas import FakeReplica, gateway_of, scenario, until

ASK = {"model": "bot", "prompt": "hello"}


@scenario
async def test_request_ids(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica) as client:
        first = await client.post(ASK, x_request_id="trace-7_a")
        assert first.headers["x-request-id"] == "trace-7_a" and "x-request-id: trace-7_a\r\n" in replica.heads[0]
        second = await client.post(ASK, x_request_id="evil\nline")
        assert second.headers["x-request-id"].startswith("req-")
        refused = await client.post({"prompt": "x"})
        assert refused.headers["x-request-id"].startswith("req-"), "errors have one too"
        assert client.lines()[0]["request"] == "trace-7_a"


@scenario
async def test_only_known_paths_are_forwarded_and_only_to_configured_addresses(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica) as client:
        for path in ("/v1/../admin", "/", "/v1/completions/", "//evil/v1/completions", "http://evil/v1/completions"):
            assert (await client.post(ASK, path)).status == 404
        assert (await client.get("/v1/completions")).status == 405
        document = (await client.get("/openapi.json")).json
        assert "/v1/messages" in document["paths"] and "/admin/keys" not in document["paths"]
        for model in ("http://169.254.169.254/", "../bot", "bot\r\nx: y", "bot@evil"):
            refused = await client.post({"model": model, "prompt": "x"})
            assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
        assert replica.bodies == []
        for body in (b"", b"[]", b"{", b'{"model": 3}', b"\xff", b"[" * 100_000):
            assert (await client.post(body)).status == 400


@scenario
async def test_a_key_that_is_there_twice_is_read_once(tmp_path: Path) -> None:
    """A replica never reads another value than the one that was checked."""
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica) as client:
        assert (await client.post(b'{"model": "x", "model": "bot", "prompt": "a", "prompt": "b"}')).status == 200
        assert replica.bodies == [{"model": "bot", "prompt": "b"}]


@scenario
async def test_cors_and_root_path(tmp_path: Path) -> None:
    settings = {"cors_origins": ["https://app.example"], "root_path": "/llm"}
    async with gateway_of(tmp_path, FakeReplica(), gateway=settings) as client:
        allowed = await client.post(ASK, "/llm/v1/completions", origin="https://app.example")
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, "https://app.example")
        other = await client.post(ASK, "/llm/v1/completions", origin="https://evil.example")
        assert "access-control-allow-origin" not in other.headers
        preflight = await client.call("OPTIONS", "/llm/v1/completions", origin="https://app.example")
        assert preflight.status == 204 and "POST" in preflight.headers["access-control-allow-methods"]


@scenario
async def test_more_requests_than_are_accepted(tmp_path: Path) -> None:
    replica = FakeReplica(tokens=3, gap_s=0.1)
    async with gateway_of(tmp_path, replica, gateway={"max_in_flight": 2}) as client:
        answers = await asyncio.gather(*(client.post(ASK | {"stream": True}) for _ in range(5)))
        assert sorted(answer.status for answer in answers) == [200, 200, 429, 429, 429]
        assert client.gateway.metrics.in_flight == 0
        client.gateway.draining = True
        assert (await client.post(ASK)).status == 503


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"models": [{"name": "a", "replicas": [{"url": "ftp://x"}]}]}, "is not an address"),
        ({"models": [{"name": "a", "replicas": [{"url": "http://u:p@x"}]}]}, "holds a password"),
        ({"models": [{"name": "a", "replicas": []}]}, "has no replicas"),
        ({"models": [{"name": "a", "replicas": [{"url": "http://x"}], "fallback": "b"}]}, "is no other model"),
        ({"models": [{"name": "a", "polcy": "prefix"}]}, "did you mean policy"),
        ({"gateway": {"retries": -1}}, "cannot be negative"),
        ({"gateway": {"idle_timeout_s": 0}}, "must be above 0"),
        ({"gateway": {"tls_key": "x"}}, "needs both"),
    ],
)
def test_a_configuration_that_cannot_work(table: dict[str, object], says: str) -> None:
    with pytest.raises(ArmillaryError, match=says):
        build(GatewayConfig, table, "gateway.toml")


def test_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text('[[models]]\nname = "bot"\nreplicas = [{ url = "http://127.0.0.1:1" }]\n[gateway]\nretries = 1\n')
    config = load_config(path)
    assert (config.models[0].replicas[0].url, config.gateway.retries) == ("http://127.0.0.1:1", 1)
    path.write_text("[models")
    with pytest.raises(ArmillaryError, match="is not TOML"):
        load_config(path)


# --- over a socket


@asynccontextmanager
async def listening(
    folder: Path, replica: FakeReplica, tls: Tls | None = None, **gateway: Any
) -> AsyncIterator[tuple[str, int]]:
    async with gateway_of(folder, replica, gateway=gateway) as client:
        sock = bind(ListenOptions(port=0))
        server = http_server(client.gateway, graceful_s=1, tls=tls)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            await until(lambda: server.started)
            yield sock.getsockname()
        finally:
            server.should_exit = True
            await task


async def raw(address: tuple[str, int], data: bytes) -> bytes:
    """Everything that comes back within a moment after these bytes."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    found = b""
    try:
        async with asyncio.timeout(0.5):
            while part := await reader.read(65536):
                found += part
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return found


@scenario
async def test_smuggled_requests_are_refused(tmp_path: Path) -> None:
    body = json.dumps(ASK).encode()
    length = b"content-length: %d\r\n" % len(body)
    chunked = b"transfer-encoding: chunked\r\n"
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    replica = FakeReplica()
    attacks = {
        "both framings": start + length + chunked + b"\r\n0\r\n\r\n" + hidden,
        "two lengths": start + length + b"content-length: 0\r\n\r\n" + body + hidden,
        "obscured chunking": start + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + hidden,
        "a space before the colon": start + b"content-length : 5\r\n\r\nhello" + hidden,
        "a bare line feed": start + b"x: y\ncontent-length: 0\r\n\r\n" + hidden,
        "a negative length": start + b"content-length: -1\r\n\r\n" + hidden,
        "a length with a sign": start + b"content-length: +5\r\n\r\nhello" + hidden,
        "two lengths in a line": start + b"content-length: 5, 5\r\n\r\nhello" + hidden,
        "a folded line": start + b"transfer-encoding:\r\n chunked\r\n" + length + b"\r\n0\r\n\r\n" + hidden,
        "chunked is not last": start + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + hidden,
        "chunked twice": start + chunked + chunked + b"\r\n0\r\n\r\n" + hidden,
        "a chunk that is larger than any": start + chunked + b"\r\n" + b"f" * 17 + b"\r\nx\r\n0\r\n\r\n" + hidden,
        "a zero byte": start + b"x: a\x00b\r\n" + length + b"\r\n" + body,
        "two keys": start + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n" + length + b"\r\n" + body,
        "two hosts": start + b"host: y\r\n" + length + b"\r\n" + body,
        "a huge head": start + b"x: " + b"y" * 300_000 + b"\r\n\r\n",
    }
    async with listening(tmp_path, replica) as address:
        answers = dict(
            zip(attacks, await asyncio.gather(*(raw(address, each) for each in attacks.values())), strict=True)
        )
        for name, found in answers.items():
            assert b" 200 " not in found, (name, found)
        assert answers["a huge head"] == b"", "the connection was closed before the end of the head"
        good = await raw(address, start + length + b"connection: close\r\n\r\n" + body)
        assert good.startswith(b"HTTP/1.1 200")
        assert len(replica.bodies) == 1, "nothing of the attacks arrived"
        assert replica.heads[0].count("content-length") == 1 and "transfer-encoding" not in replica.heads[0]


def make_certificate(folder: Path) -> Tls:
    """A certificate for 127.0.0.1 that signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    encoding, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "tls.crt").write_bytes(certificate.public_bytes(encoding))
    (folder / "tls.key").write_bytes(key.private_bytes(encoding, private, serialization.NoEncryption()))
    return Tls(certificate=folder / "tls.crt", key=folder / "tls.key")


@scenario
async def test_https(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path)
    tls.check()
    context = ssl.create_default_context(cafile=str(tls.certificate))
    async with listening(tmp_path, FakeReplica(), tls) as (host, port):
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
    with pytest.raises(ArmillaryError, match="cannot be used"):
        Tls(certificate=tls.key, key=tls.certificate).check()
    with pytest.raises(ArmillaryError, match="No such file"):
        Tls(certificate=tmp_path / "missing", key=tls.key).check()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
    ],
)
def test_every_path_with_prompts_is_counted_and_keeps_keys_apart(
    tmp_path: Path, path: str, fields: dict[str, object]
) -> None:
    """A limit of tokens is reserved and settled, and prefix caches of two keys are never shared."""

    @scenario
    async def runs(tmp_path: Path) -> None:
        replica = FakeReplica(completion_tokens=0)
        keys = KeyFile(tmp_path / "keys.json")
        limits = {"requests": 2, "tokens": 5000}
        secrets = [keys.add(name, limits=limits)[1] for name in ("one", "two")]
        async with gateway_of(tmp_path, replica) as client:
            for secret in secrets:
                answer = await client.post({"model": "bot"} | fields, path, authorization=f"Bearer {secret}")
                assert answer.status == 200, answer.text
            first = await client.post({"model": "bot"} | fields, path, authorization=f"Bearer {secrets[0]}")
            refused = await client.post({"model": "bot"} | fields, path, authorization=f"Bearer {secrets[0]}")
            assert (first.status, refused.status) == (200, 429)
            assert [line["prompt_tokens"] for line in client.lines()][:3] == [5, 5, 5]
        salts = [body["cache_salt"] for body in replica.bodies]
        assert salts[0] != salts[1] and salts[0] == salts[2]

    runs(tmp_path)


@scenario
async def test_a_salt_of_a_clients_own_divides_its_cache_and_opens_nobody_elses(tmp_path: Path) -> None:
    secrets = [KeyFile(tmp_path / "keys.json").add(name)[1] for name in ("one", "two")]
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica) as client:
        for secret in secrets:
            for more in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
                await client.post(ASK | more, authorization=f"Bearer {secret}")
    assert len({body["cache_salt"] for body in replica.bodies}) == 6


def test_a_ranking_may_repeat_its_query() -> None:
    """A model that judges reads the query with every document: the bound covers both ways."""
    query, documents = "q" * 300, ["d" * 50] * 20
    body = decode(json.dumps({"model": "m", "query": query, "documents": documents}).encode(), "/v1/rerank")
    assert body.most_prompt_tokens(1.0, 64) >= 20 * (300 + 50 + 400)
    texts = decode(json.dumps({"model": "m", "input": ["x" * 10] * 5}).encode(), "/v1/embeddings")
    assert 5 * (10 + 64) <= texts.most_prompt_tokens(1.0, 64) < 600


@scenario
async def test_one_model(tmp_path: Path) -> None:
    _, secret = KeyFile(tmp_path / "keys.json").add("one", models=["bot"])
    bearer = {"authorization": f"Bearer {secret}"}
    other = {"name": "org/other", "replicas": [{"url": "http://127.0.0.1:1"}]}
    async with gateway_of(tmp_path, FakeReplica(), more_models=[other]) as client:
        assert (await client.get("/v1/models/bot", **bearer)).json["id"] == "bot"
        assert (await client.get("/v1/models/org/other", **bearer)).status == 403
        assert (await client.get("/v1/models/bot")).status == 401

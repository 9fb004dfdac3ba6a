"""The admin API: signed calls only, each of them once, and never a hash or a foreign key in an answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from armillary.fleet.gateway.admin_signature import AdminGuard, LocalNonces, signed_header
from armillary.fleet.gateway.keys import KeyFile
from armillary.serving.http.asgi import AsgiConnection
from armillary.serving.http.problem import Problem
from armillary.store.ed25519 import public_keys
from tests.fleet.gateway.replicas import Client, FakeReplica, gateway_of, scenario

HOST = "gateway.example"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path / "admin")


def make_key(path: Path) -> Path:
    """A key pair as ssh-keygen writes it."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b" admin\n")
    return path


async def call(client: Client, key: Path, method: str, path: str, body: Any = None) -> Any:
    data = json.dumps(body).encode() if body is not None else b""
    header = signed_header(method, HOST, path, data, key)
    return await client.call(method, path, data, authorization=header, host=HOST)


@scenario
async def test_keys_and_replicas_over_http(tmp_path: Path) -> None:
    key, replicas = make_key(tmp_path / "admin"), (FakeReplica(), FakeReplica())
    KeyFile(tmp_path / "keys.json").add("first")
    settings = {"admin_keys": str(tmp_path / "admin.pub")}
    async with gateway_of(tmp_path, *replicas, gateway=settings) as client:
        added = await call(client, key, "POST", "/admin/keys", {"name": "alice", "limits": {"requests": 5}})
        assert added.status == 200
        client.gateway._admission._keys._checked_at = 0.0
        bearer = {"authorization": f"Bearer {added.json['key']}"}
        assert (await client.post({"model": "bot", "prompt": "x"}, **bearer)).status == 200
        listed = await call(client, key, "GET", "/admin/keys")
        assert [each["name"] for each in listed.json["keys"]] == ["first", "alice"] and "sha256" not in listed.text
        assert (
            await call(client, key, "POST", f"/admin/keys/{added.json['id']}/rotate", {"overlap_s": 0})
        ).status == 200
        assert (await call(client, key, "DELETE", f"/admin/keys/{added.json['id']}")).status == 200
        assert [each.name for each in KeyFile(tmp_path / "keys.json").read().values()] == ["first"]
        for body, message in (({}, "needs the name"), ({"name": "x", "secrets": []}, "unknown field secrets")):
            refused = await call(client, key, "POST", "/admin/keys", body)
            assert refused.status == 400 and message in refused.message
        used = (await call(client, key, "GET", "/admin/usage")).json["usage"]
        assert used == [{"client": "alice", "model": "bot", "prompt_tokens": 5, "completion_tokens": 3, "usd": 0.0}]
        assert (await call(client, key, "POST", "/admin/replicas/drain", {"url": replicas[0].url})).status == 200
        state = (await call(client, key, "GET", "/admin/replicas")).json["replicas"]
        assert [each["drained"] for each in state] == [True, False]
        assert (await call(client, key, "GET", "/admin/nothing")).status == 404


@scenario
async def test_a_drained_replica_gets_no_requests(tmp_path: Path) -> None:
    replicas = FakeReplica(), FakeReplica()
    async with gateway_of(tmp_path, *replicas) as client:
        next(replica for _, replica in client.models.replicas()).drained = True
        for _ in range(4):
            assert (await client.post({"model": "bot", "prompt": "x"})).status == 200
        assert [len(replica.bodies) for replica in replicas] == [0, 4]


@scenario
async def test_without_admin_keys_there_is_no_admin_api(tmp_path: Path) -> None:
    key = make_key(tmp_path / "admin")
    async with gateway_of(tmp_path, FakeReplica()) as client:
        assert (await call(client, key, "GET", "/admin/keys")).status == 404


def check(guard: AdminGuard, header: str, method: str = "GET", path: str = "/admin/keys", **more: Any) -> str:
    """Why a call is refused; empty where it is not."""
    headers = [(b"authorization", header.encode()), (b"host", more.get("host", HOST).encode())]
    connection = AsgiConnection({"method": method, "path": path, "headers": headers}, None, None)  # type: ignore[arg-type]
    try:
        asyncio.run(guard.check(connection, more.get("body", b"")))
    except Problem as problem:
        assert problem.status == 401
        return problem.message
    return ""


def test_a_call_is_accepted_once_and_unchanged(key: Path, tmp_path: Path) -> None:
    guard = AdminGuard(public_keys(key.with_suffix(".pub")), LocalNonces())
    header = signed_header("GET", HOST, "/admin/keys", b"", key)
    for change in ({"method": "DELETE"}, {"path": "/admin/usage"}, {"host": "other"}, {"body": b"{}"}):
        assert "not that of a trusted key" in check(guard, header, **change)
    assert check(guard, header) == ""
    assert "was made before" in check(guard, header)
    foreign = signed_header("GET", HOST, "/admin/keys", b"", make_key(tmp_path / "other"))
    assert "not that of a trusted key" in check(guard, foreign)
    for text in ("", "Bearer x", "Ed25519 a.b", "Ed25519 1.2.3", "Ed25519 \xff.\xff.\xff", "Ed25519 nan.n.AAAA"):
        assert check(guard, text) != ""


def test_old_calls_and_those_before_a_restart_are_refused(key: Path) -> None:
    trusted = public_keys(key.with_suffix(".pub"))
    header = signed_header("GET", HOST, "/admin/keys", b"", key)
    at = float(header.split(" ")[1].split(".")[0].replace("_", "."))
    assert "too long ago" in check(AdminGuard(trusted, LocalNonces(), clock=lambda: at + 61), header)
    now = [at - 5]
    running = AdminGuard(trusted, LocalNonces(), clock=lambda: now[0])  # since before the call
    now[0] = at + 61
    assert "too long ago" in check(running, header)
    restarted = AdminGuard(trusted, LocalNonces(), clock=lambda: at + 5)
    assert "too long ago" in check(restarted, header), "this process cannot know whether it was made before"

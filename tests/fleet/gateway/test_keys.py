"""Keys: hashed at rest, compared in constant time, and never in a log or an error."""

from __future__ import annotations

import hmac
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadInput, NotFound
from armillary.fleet.gateway import keys as keys_module
from armillary.fleet.gateway.keys import KeyFile, KeyRing
from tests.fleet.gateway.replicas import FakeReplica, gateway_of, scenario

ASK = {"model": "bot", "prompt": "a secret prompt"}


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_only_hashes_are_stored_and_only_for_this_user(tmp_path: Path) -> None:
    key, secret = KeyFile(tmp_path / "keys.json").add("alice", models=["bot"])
    text = (tmp_path / "keys.json").read_text()
    assert secret not in text and secret.split("-", 2)[2] not in text and key.id in text
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600


def test_rotation_revocation_and_expiry(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key, first = file.add("alice")
    _, second = file.rotate("alice", overlap_s=1000)
    ring = KeyRing(file)
    assert all(ring.find(secret.encode()) is not None for secret in (first, second))
    with pytest.MonkeyPatch.context() as patch:
        now = time.time()
        patch.setattr(keys_module.time, "time", lambda: now + 1001)
        assert [ring.find(secret.encode()) is not None for secret in (first, second)] == [False, True]
    _, third = file.rotate(key.id, overlap_s=0)
    ring = KeyRing(file)
    assert [ring.find(secret.encode()) is not None for secret in (first, second, third)] == [False, False, True]
    file.revoke("alice")
    assert KeyRing(file).find(third.encode()) is None and KeyRing(file).required
    _, old = file.add("bob", expires=time.time() - 1)
    assert KeyRing(file).find(old.encode()) is None
    with pytest.raises(NotFound, match=r"no key 'bbo'; did you mean bob\?"):
        file.revoke("bbo")
    file.add("bob")
    with pytest.raises(BadInput, match="2 keys have the name 'bob'; give the id of one"):
        file.revoke("bob")


def test_every_comparison_is_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for an unknown id, so that the time does not tell which ids exist."""
    _, secret = KeyFile(tmp_path / "keys.json").add("alice")
    ring, compared = KeyRing(KeyFile(tmp_path / "keys.json")), list[Any]()
    original = hmac.compare_digest

    def compare(a: Any, b: Any) -> bool:
        compared.append((len(a), len(b)))
        return original(a, b)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    for given in (secret, secret[:-1] + "x", "ak-00000000-x", "nonsense", "", "ak-\xff-1"):
        ring.find(given.encode())
    assert compared == [(64, 64)] * 6


@scenario
async def test_who_may_do_what(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    _, alice = file.add("alice", models=["bot"])
    _, bob = file.add("bob", models=["other"])
    _, monitor = file.add("monitor", scopes=["metrics"])
    async with gateway_of(tmp_path, FakeReplica()) as client:
        assert (await client.post(ASK, **bearer(alice))).status == 200
        assert (await client.post(ASK, x_api_key=alice)).status == 200
        for headers in ({}, bearer(""), bearer(alice + "x"), bearer(alice[:-1]), {"authorization": alice}):
            refused = await client.post(ASK, **headers)
            assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.post(ASK, **bearer(bob))).status == 403
        assert (await client.post(ASK, **bearer(monitor))).status == 403
        assert (await client.get("/metrics", **bearer(alice))).status == 403
        assert (await client.get("/metrics")).status == 401
        page = await client.get("/metrics", **bearer(monitor))
        assert 'armillary_gateway_tokens_total{key="alice",model="bot",kind="prompt"} 10' in page.text
        assert [card["id"] for card in (await client.get("/v1/models", **bearer(bob))).json["data"]] == []
        assert (await client.get("/health")).status == (await client.get("/ready")).status == 200
        file.revoke("alice")
        client.gateway._admission._keys._checked_at = 0.0
        assert (await client.post(ASK, **bearer(alice))).status == 401, "without a restart"


@scenario
async def test_keys_and_prompts_are_never_logged_or_forwarded(tmp_path: Path) -> None:
    _, secret = KeyFile(tmp_path / "keys.json").add("alice")
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica) as client:
        answers = [
            await client.post(ASK, **bearer(secret)),
            await client.post(ASK | {"model": "nope"}, **bearer(secret)),
            await client.post(ASK, **bearer(secret + "x")),
            await client.post(b"{" + secret.encode(), **bearer(secret)),
        ]
        assert [answer.status for answer in answers] == [200, 404, 401, 400]
        client.lines()
        private = secret.split("-", 2)[2]
        written = client.audit.read_text() + "".join(client.said) + "".join(replica.heads)
        written += "".join(answer.text for answer in answers)
        assert private not in written and "a secret prompt" not in written
        assert [line["client"] for line in client.lines()] == ["alice", "alice", None, "alice"]
        assert stat.S_IMODE(client.audit.stat().st_mode) == 0o600


def test_a_damaged_file_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    path, said = tmp_path / "keys.json", list[str]()
    _, secret = KeyFile(path).add("alice")
    ring = KeyRing(KeyFile(path), said.append)
    path.write_text("{")
    for _ in range(3):
        ring._checked_at = 0.0
        ring.refresh()
    assert ring.find(secret.encode()) is not None
    assert len(said) == 1 and "the keys stay as they were" in said[0]

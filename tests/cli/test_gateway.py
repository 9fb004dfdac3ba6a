"""`armillary gateway keys`, and what `armillary gateway` refuses to start with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from armillary.fleet.gateway.keys import KeyFile, KeyRing
from armillary.store.home import Home

Cli = Callable[..., Any]


def test_keys_from_add_to_revoke(cli: Cli, home: Home) -> None:
    assert "no keys yet, so the gateway serves everybody" in cli("gateway", "keys", "ls").out
    secret = cli(
        "gateway", "keys", "add", "alice", "--model", "bot", "--limit", "requests=60", "--days", "7", "-q"
    ).out.strip()
    path = home.work / "gateway" / "keys.json"
    key = KeyRing(KeyFile(path)).find(secret.encode())
    assert key is not None and (key.models, key.limits.requests, key.limits.window_s) == (("bot",), 60, 60.0)
    rows = cli("gateway", "keys", "ls", "--json").json
    assert (rows[0]["client"], rows[0]["state"], rows[0]["limits"]) == ("alice", "valid", "requests=60,window=60")
    assert secret not in cli("gateway", "keys", "ls").out
    second = cli("gateway", "keys", "rotate", "alice", "--overlap", "0", "-q").out.strip()
    assert (
        KeyRing(KeyFile(path)).find(secret.encode()) is None
        and KeyRing(KeyFile(path)).find(second.encode()) is not None
    )
    assert cli("gateway", "keys", "revoke", key.id, "-q").out.strip() == key.id
    assert KeyRing(KeyFile(path)).find(second.encode()) is None


def test_an_nginx_configuration(cli: Cli, tmp_path: Path) -> None:
    assert cli("gateway", "--nginx-config", str(tmp_path / "gateway.conf"), "--port", "9001").code == 0
    text = (tmp_path / "gateway.conf").read_text()
    assert "server 127.0.0.1:9001 max_fails=2" in text and "proxy_buffering off;" in text


def test_what_cannot_be_started(cli: Cli, tmp_path: Path) -> None:
    for words, says in (
        (["--port", "0"], "give either --config FILE or --upstream NAME=URL"),
        (["--upstream", "bot"], "lacks its address; write it like bot=http://127.0.0.1:8001"),
        (["--upstream", "bot=file:///etc/passwd"], "is not an address"),
        (["--config", str(tmp_path / "missing.toml")], "no file"),
    ):
        ran = cli("gateway", *words)
        assert ran.code == 2 and says in ran.err, ran.err


def test_a_key_with_a_budget(cli: Cli, home: Home) -> None:
    cli("gateway", "keys", "add", "bob", "--budget", "20usd/month", "--priority", "-1", "--weight", "2")
    (key,) = KeyFile(home.work / "gateway" / "keys.json").read().values()
    assert (key.budget.usd, key.budget.period, key.priority, key.weight) == (20.0, "month", -1, 2.0)
    assert "$20 per month" in cli("gateway", "keys", "ls").out
    cli("gateway", "keys", "add", "carl", "--limit", "requests=5, tokens=900,window=2.5")
    limits = next(
        key for key in KeyFile(home.work / "gateway" / "keys.json").read().values() if key.name == "carl"
    ).limits
    assert (limits.requests, limits.tokens, limits.window_s) == (5, 900, 2.5)
    for wrong in ("requests=0", "requests", "tokens=many", "window=0,requests=1", "window=5", "rps=4"):
        assert f"--limit {wrong}" in cli("gateway", "keys", "add", "eve", "--limit", wrong).err
    assert "try --limit requests=60" in cli("gateway", "keys", "add", "eve", "--requests", "5").err
    cli("gateway", "keys", "add", "dora", "--limit", "requests=9", "--limit", "llama:8b:tokens=700")
    dora = next(key for key in KeyFile(home.work / "gateway" / "keys.json").read().values() if key.name == "dora")
    assert (dora.limits_of("bot").requests, dora.limits_of("llama:8b").tokens) == (9, 700)
    assert (
        dora.limits_of("llama:8b").requests is None
        and "llama:8b:tokens=700" in cli("gateway", "keys", "ls", "--json").out
    )
    twice = cli("gateway", "keys", "add", "eve", "--limit", "a:requests=1", "--limit", "a:tokens=5")
    assert "--limit a:tokens=5 is the second for a" in twice.err
    assert "write it like 20usd/month" in cli("gateway", "keys", "add", "eve", "--budget", "lots").err

"""Hub models against a stand-in on loopback: what is fetched, what is reused, and each way it can fail."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from armillary.errors import ArmillaryError, BadInput, BadModel, NotFound
from armillary.store.hub import fetch, split_id
from tests.store.conftest import CONFIG, new_sessions
from tests.store.stand_in_hub import StandInHub

FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b'{"generation": 1}',
    "tokenizer.json": b'{"tokenizer": 1}',
    "tokenizer_config.json": b'{"tokenizer_config": 1}',
    "special_tokens_map.json": b'{"special": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"s" * 300_000,
}
UNWANTED = {
    "README.md": b"about",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same weights again",
    "original/model.safetensors": b"and again",
    "onnx/config.json": b"{}",
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="huggingface_hub")


def test_fetches_what_a_model_needs_and_nothing_else(hub: StandInHub) -> None:
    hub.add("acme/tiny", FILES | UNWANTED)
    folder = fetch("acme/tiny", endpoint=hub.endpoint)
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.downloads() == set(FILES)


def test_without_weights_only_the_small_files_travel(hub: StandInHub) -> None:
    hub.add("acme/tiny", FILES | UNWANTED)
    folder = fetch("acme/tiny", weights=False, endpoint=hub.endpoint)
    assert (folder / "config.json").is_file()
    assert hub.downloads() == set(FILES) - {"model.safetensors"}


def test_a_second_fetch_downloads_nothing(hub: StandInHub) -> None:
    hub.add("acme/tiny", FILES)
    first = fetch("acme/tiny", endpoint=hub.endpoint)
    hub.asked.clear()
    calls: list[int] = []
    assert fetch("acme/tiny", progress=lambda done, total: calls.append(done), endpoint=hub.endpoint) == first
    assert (hub.downloads(), calls) == (set(), [])


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: StandInHub) -> None:
    old = hub.add("acme/tiny", FILES | {"tokenizer.json": b'{"old": 1}'}, ref="v1")
    hub.add("acme/tiny", FILES)
    for revision in ("v1", old):
        folder = fetch("acme/tiny", revision=revision, endpoint=hub.endpoint)
        assert (folder / "tokenizer.json").read_bytes() == b'{"old": 1}'
    assert (fetch("acme/tiny", endpoint=hub.endpoint) / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]


def test_progress_counts_bytes_up_to_all_of_them(hub: StandInHub) -> None:
    import huggingface_hub

    if tuple(map(int, huggingface_hub.__version__.split(".")[:2])) < (1, 9):
        pytest.skip("huggingface_hub before 1.9 shows its own bars")
    hub.add("acme/tiny", FILES)
    seen: list[tuple[int, int]] = []
    fetch("acme/tiny", progress=lambda done, total: seen.append((done, total)), endpoint=hub.endpoint)
    size = sum(map(len, FILES.values()))
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


def test_nothing_is_drawn_without_a_bar_of_ours(hub: StandInHub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.add("acme/tiny", FILES)
    fetch("acme/tiny", endpoint=hub.endpoint)
    assert capfd.readouterr() == ("", "")


# --- offline


def test_offline_mode_reuses_the_cache(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/tiny", FILES)
    online = fetch("acme/tiny", endpoint=hub.endpoint)
    _go_offline(monkeypatch)
    hub.asked.clear()
    assert fetch("acme/tiny", endpoint=hub.endpoint) == online
    assert hub.asked == []


def test_a_network_that_is_gone_reuses_the_cache(hub: StandInHub) -> None:
    hub.add("acme/tiny", FILES)
    online = fetch("acme/tiny", endpoint=hub.endpoint)
    hub.stop()
    assert fetch("acme/tiny", endpoint=hub.endpoint) == online


def test_offline_and_not_cached(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/tiny", FILES)
    _go_offline(monkeypatch)
    with pytest.raises(
        NotFound, match=r"^acme/tiny is not completely in the cache and HF_HUB_OFFLINE is set; unset it"
    ):
        fetch("acme/tiny", endpoint=hub.endpoint)


def test_offline_with_only_the_small_files_cached(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/tiny", FILES)
    fetch("acme/tiny", weights=False, endpoint=hub.endpoint)
    _go_offline(monkeypatch)
    with pytest.raises(ArmillaryError, match=r"not completely in the cache|no safetensors in the cache"):
        fetch("acme/tiny", endpoint=hub.endpoint)


def test_no_network_and_not_cached(hub: StandInHub) -> None:
    hub.stop()
    with pytest.raises(NotFound, match=r"^cannot reach http://127\S+ and acme/tiny is not .* check the network$"):
        fetch("acme/tiny", endpoint=hub.endpoint)


def _go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_HUB_OFFLINE=1 does in a new process."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    new_sessions()


# --- refused


def test_an_unknown_model(hub: StandInHub) -> None:
    with pytest.raises(NotFound, match=r"^no model acme/none at \S+; check the name, or run hf auth login .* private$"):
        fetch("acme/none", endpoint=hub.endpoint)


def test_an_unknown_revision(hub: StandInHub) -> None:
    hub.add("acme/tiny", FILES)
    with pytest.raises(NotFound, match=r"^acme/tiny has no revision v9; leave @v9 out for the main one$"):
        fetch("acme/tiny", revision="v9", endpoint=hub.endpoint)


def test_a_gated_model_opens_with_a_token(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/gated", FILES, token="hf_secret")
    with pytest.raises(NotFound, match=r"^acme/gated is gated: accept its terms at \S+, then run hf auth login"):
        fetch("acme/gated", endpoint=hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (fetch("acme/gated", endpoint=hub.endpoint) / "model.safetensors").is_file()


def test_a_hub_out_of_order(hub: StandInHub) -> None:
    hub.broken_with = 500
    with pytest.raises(ArmillaryError, match=r"^http\S+ returned 500 for acme/tiny; try again later$"):
        fetch("acme/tiny", endpoint=hub.endpoint)


def test_a_model_without_safetensors(hub: StandInHub) -> None:
    hub.add("acme/old", {"config.json": FILES["config.json"], "pytorch_model.bin": b"pickle"})
    with pytest.raises(BadModel, match="acme/old has no safetensors"):
        fetch("acme/old", endpoint=hub.endpoint)
    assert "pytorch_model.bin" not in hub.downloads()


def test_a_repository_that_is_no_model(hub: StandInHub) -> None:
    hub.add("acme/notes", {"README.md": b"hello"})
    with pytest.raises(BadModel, match=r"acme/notes has no config\.json"):
        fetch("acme/notes", endpoint=hub.endpoint)


def test_an_id_the_hub_would_not_allow(hub: StandInHub) -> None:
    with pytest.raises(BadInput, match="is not a Hub id; write owner/name"):
        fetch("acme/-tiny-", endpoint=hub.endpoint)


def test_the_cache_belongs_to_the_library(hub: StandInHub, tmp_path: Path) -> None:
    hub.add("acme/tiny", FILES)
    assert (tmp_path / "hub-cache") in fetch("acme/tiny", endpoint=hub.endpoint).parents


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
        ("Qwen/Qwen3-0.6B@refs/pr/3", ("Qwen/Qwen3-0.6B", "refs/pr/3")),
        ("llama-3-8b", None),
        ("a/b/c", None),
        ("a/b@", None),
        ("/a/b", None),
    ],
)
def test_split_id(text: str, expected: tuple[str, str | None] | None) -> None:
    assert split_id(text) == expected

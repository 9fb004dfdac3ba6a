"""The registry that a command uses: the home's own folder, or a URL."""

from __future__ import annotations

from pathlib import Path

from armillary.store.ed25519 import public_keys
from armillary.store.home import Home
from armillary.store.registry.object_store import open_store
from armillary.store.registry.registry import Registry

PREFIX = "registry:"


def open_registry(home: Home, url: str = "", keys: str = "") -> Registry:
    """The registry at `url`, or of this home; `keys`: a file of public keys, one of which must have signed a release
    that is loaded."""
    trusted = public_keys(Path(keys).expanduser()) if keys else ()
    return Registry(open_store(url or home.registry), home.releases, trusted=trusted)


def split_address(text: str) -> tuple[str, str]:
    """(URL or empty, reference) of `registry:NAME@alias` or `registry:s3://bucket/folder/NAME@alias`."""
    place = text.removeprefix(PREFIX)
    if "/" not in place:
        return "", place
    url, _, reference = place.rpartition("/")
    return url, reference

"""Signed releases: only what a trusted key signed is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from armillary.errors import BadInput, BadModel, NotFound
from armillary.store.home import Home
from armillary.store.registry.open_registry import open_registry
from armillary.store.registry.release import decode, encode


def make_key(path: Path) -> Path:
    """An OpenSSH private key and its .pub, as ssh-keygen writes them."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    encoding, private = serialization.Encoding, serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(encoding.PEM, private, serialization.NoEncryption()))
    public = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_text(f"{public.decode()} someone@laptop\n")
    return path


def test_only_releases_signed_by_a_trusted_key_are_loaded(home: Home, model_folder: Path, tmp_path: Path) -> None:
    ours, theirs = make_key(tmp_path / "ours"), make_key(tmp_path / "theirs")
    strict = open_registry(home, keys=str(ours.with_suffix(".pub")))
    strict.push("tiny", model_folder)
    with pytest.raises(BadModel, match="tiny:1 is not signed; push it with --sign KEY"):
        strict.load(strict.resolve("tiny"))
    signed = strict.push("tiny", model_folder, sign_with=ours)
    assert (signed.version, signed.digest) == (2, strict.resolve("tiny:1").digest)
    assert (strict.load(signed) / "config.json").is_file()
    other = strict.push("tiny", model_folder, note="x", sign_with=theirs)
    with pytest.raises(BadModel, match="signed by an unknown key"):
        strict.load(other)


def test_a_signature_does_not_fit_another_manifest(home: Home, model_folder: Path, tmp_path: Path) -> None:
    key = make_key(tmp_path / "key")
    registry = open_registry(home, keys=str(key.with_suffix(".pub")))
    registry.push("tiny", model_folder, sign_with=key)
    path = home.registry / "tiny" / "versions" / "00000001.json"
    manifest = decode(path.read_bytes(), "tiny:1")
    forged = type(manifest)(**{**vars(manifest), "note": "trust me"})
    path.write_bytes(encode(forged))
    with pytest.raises(BadModel, match="the signature of tiny:1 does not match its content"):
        registry.load(registry.resolve("tiny:1"))


def test_keys_that_cannot_be_used(home: Home, model_folder: Path, tmp_path: Path) -> None:
    registry = open_registry(home)
    with pytest.raises(NotFound, match=r"no key .*; make one with ssh-keygen"):
        registry.push("tiny", model_folder, sign_with=tmp_path / "missing")
    (tmp_path / "bad").write_text("not a key")
    with pytest.raises(BadInput, match="cannot be read"):
        registry.push("tiny", model_folder, sign_with=tmp_path / "bad")
    with pytest.raises(BadInput, match="has no Ed25519 key"):
        open_registry(home, keys=str(tmp_path / "bad"))
    assert registry.names() == []

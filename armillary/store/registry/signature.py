"""Signatures of releases: Ed25519 over the manifest's digest, with keys as ssh-keygen writes them.

ssh-keygen -t ed25519 -f release_key      # release_key to sign, release_key.pub to verify
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, BadModel, NotFound, missing
from armillary.store.registry.release import Release, ReleaseManifest, Signature, digest_of

_PREFIX = b"armillary release sha256:"
_TYPE = "ssh-ed25519"


def sign(manifest: ReleaseManifest, private_key: Path) -> Signature:
    """The signature of a manifest by an OpenSSH or PEM private key."""
    key = _private(private_key)
    value = base64.b64encode(key.sign(_message(manifest))).decode()
    return Signature(key=_public_text(key.public_key()), value=value)


def trusted_keys(path: Path) -> tuple[str, ...]:
    """Public keys of a file, one per line, as in a .pub or authorized_keys file."""
    if not path.is_file():
        raise NotFound(f"no file {path}; write public keys into it, one per line (ssh-ed25519 AAAA…)")
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    keys = tuple(f"{_TYPE} {words[1]}" for words in lines if len(words) > 1 and words[0] == _TYPE)
    if not keys:
        raise BadInput(f"{path} has no Ed25519 key; make one with ssh-keygen -t ed25519")
    return keys


def check_signature(release: Release, trusted: tuple[str, ...]) -> None:
    """BadModel where a release is not signed by a trusted key, or its signature does not match."""
    signature = release.manifest.signature
    if signature is None:
        raise BadModel(f"{release.text} is not signed; push it with --sign KEY, or leave --trusted-keys out")
    if signature.key not in trusted:
        raise BadModel(f"{release.text} is signed by an unknown key ({signature.key[:40]}…); add it to --trusted-keys")
    if not is_valid(release.manifest):
        raise BadModel(f"the signature of {release.text} does not match its content; push it again and sign it")


def is_valid(manifest: ReleaseManifest) -> bool:
    """Whether the signature, which must exist, matches the manifest."""
    assert manifest.signature is not None
    serialization = _crypto()
    from cryptography.exceptions import InvalidSignature

    try:
        key = serialization.load_ssh_public_key(manifest.signature.key.encode())
        key.verify(base64.b64decode(manifest.signature.value), _message(manifest))
    except (InvalidSignature, ValueError, TypeError, AttributeError):
        return False
    return True


def _message(manifest: ReleaseManifest) -> bytes:
    return _PREFIX + digest_of(manifest).encode()


def _private(path: Path) -> Any:
    if not path.is_file():
        raise NotFound(f"no key {path}; make one with ssh-keygen -t ed25519 -f {path.name} -N ''")
    serialization, data = _crypto(), path.read_bytes()
    load = serialization.load_ssh_private_key if b"OPENSSH" in data else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path} cannot be read ({error}); give an Ed25519 key without a passphrase") from None
    if type(key).__name__ != "Ed25519PrivateKey" and "ed25519" not in type(key).__module__:
        raise BadInput(f"{path} is not an Ed25519 key; make one with ssh-keygen -t ed25519")
    return key


def _public_text(key: Any) -> str:
    serialization = _crypto()
    data: bytes = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return data.decode()


def _crypto() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise missing("cryptography", "signing releases", "registry") from None
    return serialization

"""Signatures of releases: Ed25519 over the manifest's digest."""

from __future__ import annotations

from pathlib import Path

from armillary.errors import BadModel
from armillary.store import ed25519
from armillary.store.registry.release import Release, ReleaseManifest, Signature, digest_of

_PREFIX = b"armillary release sha256:"


def sign(manifest: ReleaseManifest, private_key: Path) -> Signature:
    """The signature of a manifest by an OpenSSH or PEM private key."""
    key = ed25519.private_key(private_key)
    return Signature(key=ed25519.public_text(key), value=ed25519.signature_of(_message(manifest), key))


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
    return ed25519.is_signed(_message(manifest), manifest.signature.value, manifest.signature.key)


def _message(manifest: ReleaseManifest) -> bytes:
    return _PREFIX + digest_of(manifest).encode()

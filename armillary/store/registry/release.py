"""A release: one version of a name, described by a manifest that never changes.

The digest of a manifest covers its name, the checksum of every file and all facts but the time and the signature, so it
identifies the release: the same content pushed twice is one version, and a changed manifest is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from armillary.errors import ArmillaryError, BadModel
from armillary.spec.toml.fields import build, to_plain
from armillary.store import nan_safe_json
from armillary.store.manifest import FileEntry
from armillary.store.registry.reference import is_digest, is_safe_path

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The tensors of a release."""

    format: str = ""  # safetensors, gguf or onnx; empty: no weights
    bytes: int = 0
    parameters: int = 0  # of safetensors, from their headers
    dtypes: tuple[str, ...] = ()  # most numerous first


@dataclass(frozen=True, kw_only=True)
class Signature:
    """An Ed25519 signature of the manifest's digest."""

    key: str  # public key as OpenSSH writes it
    value: str  # base64


@dataclass(frozen=True, kw_only=True)
class ReleaseManifest:
    """What a release consists of and where it comes from."""

    format: int = FORMAT
    name: str
    created: float  # unix seconds
    files: Mapping[str, FileEntry]  # path inside the release -> size and checksum
    config: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json that describe the model
    tokenizer: str = ""  # checksum over the tokenizer's files: equal text, equal tokens
    weights: Weights = Weights()
    quantization: Mapping[str, Any] = field(default_factory=dict)  # of config.json; empty: none
    run: str = ""  # id of the training run it was exported from
    evals: Mapping[str, float] = field(default_factory=dict)  # metric -> value
    licence: str = ""
    note: str = ""
    signature: Signature | None = None

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Release:
    """One published version."""

    name: str
    version: int
    manifest: ReleaseManifest

    @property
    def text(self) -> str:
        return f"{self.name}:{self.version}"

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)


def digest_of(manifest: ReleaseManifest) -> str:
    """sha256 of the manifest as canonical JSON, without its time and signature."""
    table = {key: value for key, value in to_plain(manifest).items() if key not in ("created", "signature")}
    text = json.dumps(json.loads(nan_safe_json.dumps(table)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def encode(manifest: ReleaseManifest) -> bytes:
    return (nan_safe_json.dumps({**to_plain(manifest), "digest": digest_of(manifest)}, indent=1) + "\n").encode()


def decode(data: bytes, where: str) -> ReleaseManifest:
    """The manifest in a file; BadModel where it is damaged or names a file outside its folder."""
    try:
        table = nan_safe_json.loads(data)
        digest = table.pop("digest")
        newer = int(table.get("format", 0)) > FORMAT
        manifest = build(ReleaseManifest, table, where) if not newer else None
    except (ArmillaryError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise BadModel(f"the manifest of {where} is damaged ({error}); push the model again") from None
    if manifest is None:
        raise BadModel(f"{where} was written by a newer version of armillary; upgrade it")
    unsafe = [name for name in manifest.files if not is_safe_path(name)]
    broken = [name for name, entry in manifest.files.items() if not is_digest(entry.sha256)]
    if unsafe or broken:
        raise BadModel(f"the manifest of {where} names a bad file ({(unsafe + broken)[0]!r}); push the model again")
    if digest_of(manifest) != digest:
        raise BadModel(f"the manifest of {where} was changed after it was written; push the model again")
    return manifest

"""Ed25519 signatures with keys as ssh-keygen writes them: of releases, and of calls to a gateway's admin API.

ssh-keygen -t ed25519 -f my_key      # my_key to sign, my_key.pub to verify
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, NotFound, missing

_TYPE = "ssh-ed25519"


def private_key(path: Path) -> Any:
    """An OpenSSH or PEM private key without a passphrase."""
    if not path.is_file():
        raise NotFound(f"no key {path}; make one with ssh-keygen -t ed25519 -f {path.name} -N ''")
    serialization, data = crypto(), path.read_bytes()
    load = serialization.load_ssh_private_key if b"OPENSSH" in data else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path} cannot be read ({error}); give an Ed25519 key without a passphrase") from None
    if type(key).__name__ != "Ed25519PrivateKey" and "ed25519" not in type(key).__module__:
        raise BadInput(f"{path} is not an Ed25519 key; make one with ssh-keygen -t ed25519")
    return key


def public_text(key: Any) -> str:
    """The public part of a private key, as in a .pub file."""
    serialization = crypto()
    data: bytes = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return data.decode()


def public_keys(path: Path) -> tuple[str, ...]:
    """Public keys of a file, one per line, as in a .pub or authorized_keys file."""
    if not path.is_file():
        raise NotFound(f"no file {path}; write public keys into it, one per line (ssh-ed25519 AAAA…)")
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    keys = tuple(f"{_TYPE} {words[1]}" for words in lines if len(words) > 1 and words[0] == _TYPE)
    if not keys:
        raise BadInput(f"{path} has no Ed25519 key; make one with ssh-keygen -t ed25519")
    return keys


def signature_of(message: bytes, key: Any) -> str:
    return base64.b64encode(key.sign(message)).decode()


def is_signed(message: bytes, signature: str, public: str) -> bool:
    """Whether a signature is that of a message by the private part of a public key."""
    serialization = crypto()
    from cryptography.exceptions import InvalidSignature

    try:
        serialization.load_ssh_public_key(public.encode()).verify(base64.b64decode(signature), message)
    except (InvalidSignature, ValueError, TypeError, AttributeError):
        return False
    return True


def crypto() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise missing("cryptography", "signatures", "registry") from None
    return serialization

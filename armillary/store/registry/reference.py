"""How a person names a release: NAME (its newest version), NAME:VERSION, NAME@ALIAS or NAME@sha256:DIGEST.

Names become paths in a store, so only letters, digits, dots and dashes are allowed, and nothing that begins with a dot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from armillary.errors import BadInput

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_REFERENCE = re.compile(
    r"(?P<name>[^:@]+)(?::(?P<version>\d{1,8})|@sha256:(?P<digest>[0-9a-f]{8,64})|@(?P<alias>[^:@]+))?"
)
_PATH_PART = re.compile(r"[A-Za-z0-9_\-+=,()\[\] ][A-Za-z0-9._\-+=,()\[\] ]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
LATEST = "latest"
_RESERVED = ("blobs", "marks")
"""folders of a registry beside those of its names"""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A release as it was asked for; with none of the three, its newest version."""

    name: str
    version: int | None = None
    alias: str | None = None
    digest: str | None = None  # at least the first eight digits

    @property
    def moves(self) -> bool:
        """Whether it can stand for another version later."""
        return self.version is None and self.digest is None


def parse_reference(text: str) -> Reference:
    match = _REFERENCE.fullmatch(text)
    if match is None or not is_name(match["name"]):
        raise BadInput(f"'{text[:80]}' is not a release; write name, name:version, name@alias or name@sha256:digest")
    version = int(match["version"]) if match["version"] else None
    alias = None if match["alias"] in (None, LATEST) else match["alias"]
    return Reference(name=match["name"], version=version, alias=alias, digest=match["digest"])


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and text not in _RESERVED


def check_name(kind: str, name: str) -> None:
    """BadInput where `name` cannot be a folder or file of a store."""
    if not is_name(name):
        raise BadInput(f"'{name[:80]}' cannot name {kind}; use small letters, digits, dots and dashes")


def check_alias(alias: str) -> None:
    check_name("an alias", alias)
    if alias.isdigit() or alias == LATEST or alias.startswith("sha256"):
        raise BadInput(f"'{alias}' cannot be an alias, because versions use it; choose a word like champion")


def is_safe_path(path: str) -> bool:
    """Whether a file name of a manifest stays inside its folder; hidden files and odd characters are refused too."""
    return bool(path) and all(_PATH_PART.fullmatch(part) for part in path.split("/"))


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None

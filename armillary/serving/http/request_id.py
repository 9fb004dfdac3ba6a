"""The id of a request: the client's own where it is a plain word, else a new one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

HEADER = b"x-request-id"


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    given = headers.get(HEADER, b"")[:64].decode("ascii", "replace")
    return given if given and given.replace("-", "").replace("_", "").isalnum() else f"req-{secrets.token_hex(12)}"

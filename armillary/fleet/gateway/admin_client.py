"""Calls a gateway's admin API with a signature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from armillary.errors import ArmillaryError, BadInput
from armillary.fleet.gateway.admin_signature import signed_header

_TIMEOUT_S = 30.0


def call_admin(url: str, method: str, path: str, body: bytes, key: Path) -> Any:
    """The JSON of the answer; ArmillaryError with the gateway's own message where it refuses."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadInput(f"'{url}' is not an address; write it like http://127.0.0.1:9000")
    request = Request(url.rstrip("/") + path, data=body or None, method=method)
    request.add_header("host", parts.netloc)
    request.add_header("content-type", "application/json")
    request.add_header("authorization", signed_header(method, parts.netloc, path, body, key))
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except HTTPError as error:
        raise ArmillaryError(_message(error)) from None
    except (URLError, TimeoutError, ValueError) as error:
        raise ArmillaryError(f"{url} does not answer ({error}); check the address of the gateway") from None


def _message(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {error.code}; check its address and log"

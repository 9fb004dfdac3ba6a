"""API keys: a file with one key per line, and the check of a request against them."""

import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from armillary.errors import BadInput, NotFound

REFUSAL = "the API key is missing or wrong; send it as Authorization: Bearer KEY"


def read_keys(name: str) -> tuple[str, ...]:
    """The keys in the file `name`; an empty name gives none, so that no key is required."""
    if not name:
        return ()
    path = Path(name).expanduser()
    if not path.is_file():
        raise NotFound(f"no file {path}; write one API key per line into it")
    keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not keys:
        raise BadInput(f"{path} holds no API key; write one per line into it")
    return keys


class ApiKeys:
    """The keys that a server accepts; without any, it accepts every request."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]

    def admits(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request with these headers (names in lower case) is accepted."""
        if not self._keys:
            return True
        given = headers.get(b"authorization", b"")
        key = given[7:] if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        return any([hmac.compare_digest(key, known) for known in self._keys])

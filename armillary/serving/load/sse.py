"""Server-sent events out of the bytes of a response, however the network cut them."""

from __future__ import annotations


class EventStream:
    """Collects bytes and gives the data of every complete event (WHATWG HTML, section 9.2)."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, some: bytes) -> list[bytes]:
        """Data of the events that `some` completes."""
        *lines, self._rest = (self._rest + some).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found

    def close(self) -> list[bytes]:
        """Data of a last event whose blank line never came."""
        found = self.feed(b"\n\n") if self._rest or self._data else []
        self._rest = b""
        return found

"""Chrome trace JSON read as a stream: one event at a time, for files of any size.

Only a window of the text is in memory. A truncated file, or one that is no trace, is refused with how far it could be
read, because the budget of half a step would look like a result.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from armillary.errors import BadData

_CHUNK = 1 << 22
_LONGEST_VALUE = 1 << 27
"""characters: no event and no header is longer, so a longer one is a broken file"""
_EDGE = 64
"""characters from the window's end within which a syntax error may only mean that the text is truncated"""
_BETWEEN = re.compile(r"\}\s*,\s*\{")
_LAST = 1 << 16
"""characters at the window's end in which the last whole event is looked for"""
_SPACE = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder(strict=False)  # control characters occur in kernel names


class _BreaksOff(Exception):
    """The text ends inside a value."""


@dataclass
class ChromeTrace:
    """A file's events as an iterator; the other fields (deviceProperties, distributedInfo …) are in `about` once it
    is exhausted."""

    path: Path
    gzipped: bool
    about: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with _open(self.path, self.gzipped) as file:
                yield from self._events(_Text(file))
        except _BreaksOff:
            raise BadData(f"{self.path} breaks off after {self.count:,} events; {_AGAIN}") from None
        except (EOFError, zlib.error):
            raise BadData(f"{self.path} is a gzip file that breaks off after {self.count:,} events; {_AGAIN}") from None
        except gzip.BadGzipFile as error:
            raise BadData(f"{self.path} is not a whole gzip file ({error}); {_AGAIN}") from None
        except RecursionError:
            raise BadData(f"{self.path} is nested too deep after {self.count:,} events; {_AGAIN}") from None
        except json.JSONDecodeError as error:
            raise BadData(f"{self.path} is broken after {self.count:,} events ({error.msg}); {_AGAIN}") from None

    def _events(self, text: _Text) -> Iterator[dict[str, Any]]:
        opening = text.peek()
        if opening == "[":
            yield from self._array(text)
        elif opening == "{":
            yield from self._object(text)
        else:
            raise BadData(f"{self.path} is not JSON; give a torch-profiler trace or an nsys SQLite export")

    def _object(self, text: _Text) -> Iterator[dict[str, Any]]:
        text.skip()
        has_events = False
        while text.peek() != "}":
            key = text.value()
            if text.peek() != ":":
                raise json.JSONDecodeError("a key without a value", "", 0)
            text.skip()
            if key == "traceEvents" and text.peek() == "[":
                has_events = True
                yield from self._array(text)
            else:
                self.about[str(key)] = text.value()
        if not has_events:
            raise BadData(f"{self.path} is JSON without traceEvents; give a torch-profiler trace")

    def _array(self, text: _Text) -> Iterator[dict[str, Any]]:
        text.skip()
        while text.peek() != "]":
            for event in text.many() or [text.value()]:
                if not isinstance(event, dict):
                    raise BadData(f"{self.path} holds a list that is not of events; give a torch-profiler trace")
                self.count += 1
                yield event
        text.skip()


_AGAIN = "record it again and let the program end"


def _open(path: Path, gzipped: bool) -> TextIO:
    if gzipped:
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace")
    return path.open(encoding="utf-8-sig", errors="replace")


@dataclass
class _Text:
    """A window of the file that moves forward."""

    file: TextIO
    buffer: str = ""
    at: int = 0
    one_by_one: bool = False
    """whether reading many at once failed in this window"""

    def peek(self) -> str:
        """The next character that is neither space nor comma."""
        while True:
            match = _SPACE.match(self.buffer, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            self._more()

    def skip(self) -> None:
        self.at += 1

    def value(self) -> Any:
        """The next JSON value; a value truncated at the window's edge is parsed again with more text."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                self._more_or(error)
                continue
            if end == len(self.buffer) and not isinstance(value, dict | list | str) and self._try_more():
                continue  # a number may go on
            self.at = end
            return value

    def many(self) -> list[Any]:
        """All objects of a list that end in the window, parsed at once; none where that fails: parsing one by one then
        tells why."""
        if self.one_by_one:
            return []
        cuts = _BETWEEN.finditer(self.buffer, max(self.at, len(self.buffer) - _LAST))
        last = max(cuts, key=lambda match: match.start(), default=None)
        if last is None or self.buffer[self.at] != "{":
            return []
        try:
            values: list[Any] = _DECODER.decode(f"[{self.buffer[self.at : last.start() + 1]}]")
        except json.JSONDecodeError:  # truncated inside an event: retried once there is more text
            self.one_by_one = True
            return []
        self.at = last.start() + 1
        return values

    def _more_or(self, error: json.JSONDecodeError) -> None:
        """More text, unless the fault lies well inside the window: then the file is broken there."""
        left = len(self.buffer) - self.at
        inside = len(self.buffer) - error.pos > _EDGE and not error.msg.startswith("Unterminated")
        if inside or left > _LONGEST_VALUE:
            raise error
        self._more()

    def _more(self) -> None:
        if not self._try_more():
            raise _BreaksOff

    def _try_more(self) -> bool:
        text = self.file.read(max(_CHUNK, len(self.buffer) - self.at))
        self.buffer, self.at, self.one_by_one = self.buffer[self.at :] + text, 0, False
        return bool(text)

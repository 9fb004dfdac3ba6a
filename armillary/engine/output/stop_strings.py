"""Stop strings, searched for as the text grows: a possible beginning of one is held back."""

from collections.abc import Sequence as Items


class StopText:
    """Passes text on until one of `stops` is in it."""

    def __init__(self, stops: Items[str], *, include: bool = False) -> None:
        """`include`: the stop string is part of the output."""
        self._include = include
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text to emit now; `stopped` says whether a stop string came."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        places = [(place, len(stop)) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            place, length = min(places)
            return text[: place + length if self._include else place]
        kept = self._beginning(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """The held-back text, which is no stop string."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest suffix of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

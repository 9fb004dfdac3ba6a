"""Dictionaries from names of blocks to numbers, in parts.

A dictionary that has to grow copies itself, which at a hundred thousand entries takes milliseconds; each of many small
ones takes microseconds, and at different times.
"""

_PARTS = 256
_ENTRIES = 256
"""expected in a part: with fewer blocks there are fewer parts"""


class DigestMap:
    """`part(key)` is the dictionary that has the key, if any has."""

    __slots__ = ("mask", "parts")

    def __init__(self, expected: int) -> None:
        count = min(_PARTS, 1 << (expected // _ENTRIES).bit_length())
        self.mask = count - 1
        self.parts: list[dict[bytes, int]] = [{} for _ in range(count)]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __contains__(self, key: bytes) -> bool:
        return key in self.parts[hash(key) & self.mask]

    def part(self, key: bytes) -> dict[bytes, int]:
        return self.parts[hash(key) & self.mask]

    def get(self, key: bytes) -> int:
        """The number of a key, or 0."""
        return self.parts[hash(key) & self.mask].get(key, 0)

    def count(self, key: bytes, more: int) -> None:
        """Add to a key's number; at 0 the key is removed."""
        part = self.parts[hash(key) & self.mask]
        number = part.get(key, 0) + more
        if number:
            part[key] = number
        else:
            del part[key]

    def clear(self) -> None:
        for part in self.parts:
            part.clear()

    def plain(self) -> dict[bytes, int]:
        """All entries as one dictionary."""
        return {key: number for part in self.parts for key, number in part.items()}

"""Texts as numbers for a classifier behind /predict: counts of character trigrams, hashed to a fixed length.

Train the classifier on the same features: `hashed_ngrams(text, 1024)`. CRC-32 of the lower-case UTF-8 trigram, modulo
the length; the vector is scaled to length 1.
"""

from __future__ import annotations

import math
from zlib import crc32


def hashed_ngrams(text: str, length: int) -> list[float]:
    data, counts = text.lower().encode("utf-8", "replace"), [0.0] * length
    for start in range(len(data) - 2):
        counts[crc32(data[start : start + 3]) % length] += 1.0
    norm = math.sqrt(sum(count * count for count in counts))
    return [round(count / norm, 5) for count in counts] if norm else counts

"""A model's own sampling defaults from its generation_config.json, for fields that a request leaves out."""

import json
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from armillary.errors import BadModel

_RANGES = {
    "temperature": (0, 1e4),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "max_new_tokens": (1, 2**31 - 1),
}
_WHOLE = ("top_k", "max_new_tokens")
_ABOVE_ZERO = ("top_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Sampling parameters that a model was published with; None: not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    """most tokens of a response whose request names no limit"""

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.given.items())


def sampling_defaults(folder: Path | None) -> SamplingDefaults:
    """Of a Hugging Face folder; BadModel where a value is unusable."""
    if folder is None:
        return SamplingDefaults()
    path = folder / "generation_config.json"
    table = read_json(path)
    return SamplingDefaults(
        **{name: _checked(name, table[name], path) for name in _RANGES if table.get(name) is not None}
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where the file does not exist."""
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadModel(f"{path} is not JSON ({error}); fetch the folder again") from None
    if not isinstance(table, dict):
        raise BadModel(f"{path} does not hold a JSON object; fetch the folder again")
    return table


def _checked(name: str, value: Any, path: Path) -> Any:
    low, high = _RANGES[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not number
        or not isfinite(value)
        or not low <= value <= high
        or (name in _ABOVE_ZERO and not value > 0)
        or (name in _WHOLE and value != int(value))
    ):
        raise BadModel(
            f"{path} has {name}={value!r}, which cannot be sampled with; correct it, or try --set "
            "serve.generation_config=none"
        )
    return max(0, int(value)) if name in _WHOLE else float(value)

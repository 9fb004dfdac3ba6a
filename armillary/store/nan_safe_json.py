"""Standard JSON with NaN and infinities, written as "nan", "inf" and "-inf" and read back as floats.

A NaN loss must neither become null nor make the file unreadable for other programs.
"""

import json
import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armillary.errors import BadData, NotFound, Unreadable

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(value: Any, *, indent: int | None = None) -> str:
    """`value` as JSON; numpy scalars are numbers, other unknown types a TypeError."""
    separators = (",", ":") if indent is None else None
    return json.dumps(_plain(value), indent=indent, separators=separators, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError where it is not JSON."""
    return restore(json.loads(text))


def restore(value: Any) -> Any:
    """Convert "nan", "inf" and "-inf" to floats, at any depth."""
    if isinstance(value, str):
        return _SPECIAL.get(value, value)
    if isinstance(value, dict):
        return {key: restore(item) for key, item in value.items()}
    return [restore(item) for item in value] if isinstance(value, list) else value


def read(path: Path) -> Any:
    """The value of a JSON file; an error that names the file."""
    try:
        return loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(f"no file {path}; check the name") from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror}); check its type and permissions") from error
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path} is not readable JSON ({error}); restore it or delete it") from None


def read_table(path: Path) -> dict[str, Any]:
    """`read`, for a file that must hold an object."""
    value = read(path)
    if not isinstance(value, dict):
        raise BadData(f"{path} holds a {type(value).__name__} instead of a JSON object; restore it or delete it")
    return value


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else repr(number)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON")

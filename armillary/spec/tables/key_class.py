"""What an edited key means for a run that is to be resumed: every key of a recipe is free, noted or defining.

The class stands beside the key, as a marker around its type: `lr: Noted[float | None] = None`. A whole table has one
where the recipe names it: `serve: Free[Serve]`. Types are read without the marker, so nothing else sees it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

KeyClass = Literal["free", "noted", "defining"]
MEANING: dict[KeyClass, str] = {
    "free": "the run continues",
    "noted": "the run continues, and one line says what changed",
    "defining": "it is another run: `--run NAME` is refused, and without it `train` stops and asks for `--new`",
}
"""what happens when a key of this class is edited between two starts of a run"""
T = TypeVar("T")


class _Marker:
    """Holds a class inside Annotated."""

    def __init__(self, of: KeyClass) -> None:
        self.of = of


_FREE, _NOTED, _DEFINING = _Marker("free"), _Marker("noted"), _Marker("defining")
Free = Annotated[T, _FREE]
"""it changes no number that training computes"""
Noted = Annotated[T, _NOTED]
"""it changes how training goes on from here: rates, length, number format, layout"""
Defining = Annotated[T, _DEFINING]
"""it says which training this is: model, data, seed, batch, sequence"""


def classes_of(cls: type[Any]) -> dict[str, KeyClass | None]:
    """Field -> its class, in order; None where it has no marker."""
    return {name: _class(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


def _class(hint: Any) -> KeyClass | None:
    markers = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((one.of for one in markers if isinstance(one, _Marker)), None)

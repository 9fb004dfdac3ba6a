"""Key classes: what editing a recipe key means for a resumed run (free, noted or defining).

The class is a marker around the type: `lr: Noted[float | None] = None`. A table has one where the recipe names it:
`serve: Free[Serve]`. Types are read without the marker, so nothing else sees it.
"""

from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

KeyClass = Literal["free", "noted", "defining"]
MEANING: dict[KeyClass, str] = {
    "free": "the run continues",
    "noted": "the run continues, and one line says what changed",
    "defining": "it is another run: `--run NAME` is refused, and without it `train` stops and asks for `--new`",
}
"""what happens when a key of this class is edited between two starts of a run"""
T = TypeVar("T")


Free = Annotated[T, "free"]
"""changes no number that training computes"""
Noted = Annotated[T, "noted"]
"""changes how training continues: rates, length, dtype, layout"""
Defining = Annotated[T, "defining"]
"""identifies the training: model, data, seed, batch, sequence"""


def classes_of(cls: type[Any]) -> dict[str, KeyClass | None]:
    """Field -> its class, in order; None where it has no marker."""
    return {name: _class(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


def _class(hint: Any) -> KeyClass | None:
    markers = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((marker for marker in markers if marker in MEANING), None)

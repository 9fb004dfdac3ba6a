"""One small tree of errors for people: each message is one line and ends with the next step.

The command line prints the message and exits with code 2; a traceback means a bug of ours.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ArmillaryError(Exception):
    """Something the user can put right."""


class NotFound(ArmillaryError):
    """A name or file that is not there."""


class BadInput(ArmillaryError):
    """A value or key that cannot be used."""


class BadRecipe(BadInput):
    """A recipe that contradicts itself or does not parse."""


class BadLayout(BadInput):
    """A layout that does not divide the model or the devices."""


class BadModel(BadInput):
    """A model folder that is broken, or a shape the module cannot build."""


class BadData(BadInput):
    """Text, shards or an index that cannot be read."""


class Unreadable(BadData):
    """A file that is there, and that the disk fails to read."""


class ContextLengthExceeded(BadInput):
    """A prompt, alone or with its completion, that is longer than the model's context."""

    code = "context_length_exceeded"
    """OpenAI's name for this error, which clients look for"""


class Overloaded(ArmillaryError):
    """A full queue: the same request may be accepted later."""

    code = "rate_limit_exceeded"


class MissingPart(ArmillaryError):
    """An optional package or program that is not installed."""


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option a person most likely meant, or None."""
    return next(iter(get_close_matches(name.lower(), list(options), n=1, cutoff=0.6)), None)


def unknown(kind: str, name: str, options: Iterable[str], *, where: str = "") -> NotFound:
    """A NotFound that offers the nearest real name, or says where the list is."""
    options = list(options)
    guess = nearest(name, options)
    hint = f"did you mean {guess}?" if guess else f"one of: {', '.join(sorted(options)[:12])}"
    return NotFound(f"no {kind} '{name}'; {hint}" + (f" ({where})" if where else ""))


def missing(package: str, needed_for: str, extra: str) -> MissingPart:
    """A MissingPart that says which extra brings the package."""
    return MissingPart(f"{needed_for} needs {package}: pip install 'armillary[{extra}]'")


def one_line(error: object, most: int | None = None) -> str:
    """The text of an error as one line of at most `most` characters."""
    return " ".join(str(error).split())[:most]

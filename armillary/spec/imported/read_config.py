"""Another trainer's configuration, recognised by its file, as a recipe with what became of every key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from armillary.errors import BadRecipe, NotFound
from armillary.spec.imported.from_deepspeed import read_deepspeed
from armillary.spec.imported.from_megatron import read_megatron
from armillary.spec.imported.from_torchtitan import read_torchtitan
from armillary.spec.imported.key_map import Given, Imported
from armillary.spec.recipe import to_toml

READERS: Mapping[str, Callable[[str, Given], Imported]] = {
    "torchtitan": read_torchtitan,
    "deepspeed": read_deepspeed,
    "megatron": read_megatron,
}
SUFFIXES = {".toml": "torchtitan", ".json": "deepspeed", ".sh": "megatron", ".txt": "megatron", ".args": "megatron"}


def read_configuration(path: Path, given: Given, kind: str | None = None) -> Imported:
    """The recipe of a file; `kind` where its suffix does not say what it is."""
    kind = kind or SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise BadRecipe(f"{path} ends in none of {', '.join(SUFFIXES)}; say what it is with --from {'|'.join(READERS)}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound(f"no file {path}; name the configuration of {kind}") from None
    except OSError as error:
        raise NotFound(f"{path} cannot be read ({error.strerror}); name the configuration of {kind}") from None
    except UnicodeDecodeError:
        raise BadRecipe(f"{path} is not text in UTF-8; save it as UTF-8") from None
    return READERS[kind](text, given)


def recipe_text(imported: Imported, source: str) -> str:
    """The recipe as a file; what has no counterpart is in the comment above it."""
    lines = [f"# from {source}"]
    if imported.left_out:
        lines.append("# left out:")
        lines += [f"#   {row.theirs} = {_short(row.value)}: {row.reason}" for row in imported.left_out]
    return "\n".join(lines) + "\n\n" + to_toml(imported.recipe)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"

"""A user's module: `FILE.py:NAME`, where NAME is a torch module or a callable that returns one."""

import sys
from difflib import get_close_matches
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from armillary.errors import BadInput, NotFound


def is_python_module(text: str) -> bool:
    """Whether `text` is like net.py:Net."""
    return text.partition(":")[0].endswith(".py")


def load_python_module(text: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """(module, its example inputs with rows first, where the file or the module has `example_inputs`)."""
    file, _, name = text.partition(":")
    if not name:
        raise BadInput(f"{file} needs the name of a module in it; write it like {file}:Net")
    values = _run(Path(file))
    if name not in values:
        own = [key for key in values if not key.startswith("_")]
        guess = get_close_matches(name, own, n=1)
        hint = f"did you mean {guess[0]}?" if guess else f"it has {', '.join(own)}"
        raise NotFound(f"no '{name}' in {file}; {hint}")
    module = _as_module(values[name], text)
    given = getattr(module, "example_inputs", None)
    examples = given if given is not None else values.get("example_inputs", ())
    examples = examples() if callable(examples) else examples
    examples = (examples,) if isinstance(examples, Tensor) else tuple(examples)
    if not all(isinstance(tensor, Tensor) and tensor.ndim for tensor in examples):
        raise BadInput(f"example_inputs of {text} must be tensors with rows first; or give --input")
    return module, examples


def _run(path: Path) -> dict[str, Any]:
    """The names in the file after it ran, with its own folder on the import path."""
    if not path.is_file():
        raise NotFound(f"no file {path}; give the path of a Python file, like net.py:Net")
    spec = spec_from_file_location(f"armillary_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[spec.name] = module  # dataclasses and pickle look up a class's module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return vars(module)


def _as_module(value: Any, text: str) -> nn.Module:
    if not isinstance(value, nn.Module) and callable(value):
        try:
            value = value()
        except TypeError as error:
            raise BadInput(f"{text} cannot be called without arguments ({error}); name a function that can") from None
    if not isinstance(value, nn.Module):
        raise BadInput(f"{text} is a {type(value).__name__}, not a torch module; name a module, or what gives one")
    return value

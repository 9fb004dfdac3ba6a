"""A user's module: `FILE.py:NAME`, where NAME is a torch module or a callable that returns one."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from armillary.errors import BadInput, NotFound
from armillary.spec.python_file import run_python_file


def is_python_module(text: str) -> bool:
    """Whether `text` is like net.py:Net."""
    return text.partition(":")[0].endswith(".py")


def load_python_module(text: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """(module, its example inputs with rows first, where the file or the module has `example_inputs`)."""
    file, _, name = text.partition(":")
    if not name:
        raise BadInput(f"{file} needs the name of a module in it; write it like {file}:Net")
    values = run_python_file(Path(file))
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


def _as_module(value: Any, text: str) -> nn.Module:
    if not isinstance(value, nn.Module) and callable(value):
        try:
            value = value()
        except TypeError as error:
            raise BadInput(f"{text} cannot be called without arguments ({error}); name a function that can") from None
    if not isinstance(value, nn.Module):
        raise BadInput(f"{text} is a {type(value).__name__}, not a torch module; name a module, or what gives one")
    return value

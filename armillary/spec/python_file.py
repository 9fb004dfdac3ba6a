"""Runs a user's Python file, on explicit request only: it can do whatever its user can."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError, BadInput, NotFound


def run_python_file(path: Path) -> dict[str, Any]:
    """The names in the file after it ran, with its own folder on the import path."""
    if not path.is_file():
        raise NotFound(f"no file {path}; give the path of a Python file")
    spec = spec_from_file_location(f"armillary_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[spec.name] = module  # dataclasses and pickle look up a class's module
    try:
        spec.loader.exec_module(module)
    except ArmillaryError:
        raise
    except Exception as error:
        raise BadInput(f"{path} fails: {type(error).__name__}: {error}; mend it") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return vars(module)

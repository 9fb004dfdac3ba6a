"""typst, with the fonts of this machine read once."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from armillary.errors import BadInput, missing


def typeset(
    source: bytes, name: str, data: object, form: Literal["pdf", "png"], *, template: str = "", ppi: float = 150
) -> bytes:
    """What `source` makes of `data`, which it reads as JSON from sys.inputs under `name`; `template` is the file that
    the source is from, where a user wrote it."""
    run = compiler()
    root = str(Path(template).parent) if template else None
    from typst import TypstError

    try:
        output = run.compile(source, format=form, ppi=ppi, root=root, sys_inputs={name: json.dumps(data)})
    except TypstError as error:
        if not template:
            raise
        why = " ".join(str(error).split())[:200]
        raise BadInput(f"the template {template} does not compile ({why}); correct it or leave it out") from None
    assert isinstance(output, bytes), "one page or one file"
    return output


@cache
def compiler() -> Any:
    try:
        import typst
    except ModuleNotFoundError:
        raise missing("typst", "a PDF or a chart in a document", "documents") from None
    return typst.Compiler(font_paths=typst.Fonts())

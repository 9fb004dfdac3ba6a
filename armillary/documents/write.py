"""Files of a report: one per format, written whole or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from armillary.documents.blocks import Report
from armillary.errors import BadInput, nearest

FORMATS = {
    "docx": "armillary.documents.writers.docx:write_docx",
    "xlsx": "armillary.documents.writers.xlsx:write_xlsx",
    "pdf": "armillary.documents.writers.pdf:write_pdf",
    "pptx": "armillary.documents.writers.pptx:write_pptx",
    "html": "armillary.documents.writers.html_page:write_html",
    "md": "armillary.documents.writers.markdown:write_markdown",
}
"""format -> module:function that writes it; their libraries are imported when one is"""
Watch = Callable[[str], None]


def read_formats(text: str) -> list[str]:
    """'docx,pdf' -> formats; BadInput names the nearest for one that is unknown."""
    names = list(dict.fromkeys(name.strip().lower().removeprefix(".") for name in text.split(",") if name.strip()))
    for name in names:
        if name not in FORMATS:
            guess = nearest(name, FORMATS)
            hint = f"did you mean {guess}?" if guess else f"it takes {', '.join(FORMATS)}"
            raise BadInput(f"no format '{name}'; {hint}")
    if not names:
        raise BadInput(f"--to names no format; it takes {', '.join(FORMATS)}")
    return names


def write_documents(
    report: Report, formats: Iterable[str], folder: Path, watch: Watch = lambda name: None
) -> list[Path]:
    """Write every format into `folder`; the files are named after the report."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in formats:
        module, function = FORMATS[name].split(":")
        path = folder / f"{file_stem(report)}.{name}"
        partial = path.with_name(f".{path.name}.partial")
        try:
            getattr(import_module(module), function)(report, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        paths.append(path)
        watch(name)
    return paths


def file_stem(report: Report) -> str:
    """The title as a file name: small letters, digits and hyphens."""
    words = re.sub(r"[^\w]+", "-", report.title.lower(), flags=re.UNICODE).strip("-")
    return words[:60].rstrip("-") or "report"

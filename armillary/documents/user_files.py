"""Files that a user brings: the logo of the first page, and templates."""

from pathlib import Path

from armillary.errors import BadInput, NotFound
from armillary.spec.tables.report import ReportTable

TEMPLATES = (".docx", ".pptx", ".typ")
LARGEST = 2_000_000
KINDS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")


def logo_bytes(path: str) -> bytes:
    """The file's bytes; none where no logo is named."""
    if not path:
        return b""
    try:
        data = Path(path).read_bytes()
    except OSError:
        raise NotFound(f"no logo '{path}'; give a PNG or JPEG file with --set report.logo=PATH") from None
    if not data.startswith(KINDS):
        raise BadInput(f"the logo {path} is neither PNG nor JPEG; convert it, or leave report.logo out")
    if len(data) > LARGEST:
        raise BadInput(f"the logo {path} has {len(data):,} bytes; give one of at most {LARGEST:,}")
    return data


def template_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        raise NotFound(f"no template '{path}'; name a .docx, .pptx or .typ file in report.template") from None


def check_user_files(options: ReportTable) -> None:
    """Refuse a logo or a template that no format can use, before anything is planned."""
    logo_bytes(options.logo)
    for path in options.template:
        if not path.lower().endswith(TEMPLATES):
            raise BadInput(
                f"the template {path} is of no known kind; report.template takes {', '.join(TEMPLATES)} files"
            )
        template_bytes(path)

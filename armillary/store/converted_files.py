"""Which model files this user's `armillary convert` wrote: one record each, named by the SHA-256 of the file.

Records lie in the user's cache, not beside the file: whoever can replace the file alone cannot make one.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from armillary.store.home import Home


def digest_of(file: Path) -> str:
    """SHA-256 of its bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def remember(home: Home, file: Path) -> str:
    """Record that `file`, as it is now, was written by convert; its digest."""
    digest = digest_of(file)
    home.converted.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps({"file": str(file.absolute()), "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
    (home.converted / f"{digest}.json").write_text(text + "\n", encoding="utf-8")
    return digest


def is_known(home: Home, digest: str) -> bool:
    """Whether convert wrote a file of these bytes."""
    return (home.converted / f"{digest}.json").is_file()

"""Model files that this user's `armillary convert` wrote: one record per file, named by its SHA-256.

Records are in the user's cache rather than beside the file, so that replacing the file is not enough to be trusted.
"""

import json
import time
from pathlib import Path

from armillary.store.home import Home
from armillary.store.manifest import sha256


def remember(home: Home, file: Path) -> str:
    """Record that convert wrote `file` with its present content; its digest."""
    digest = sha256(file)
    home.converted.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps({"file": str(file.absolute()), "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
    (home.converted / f"{digest}.json").write_text(text + "\n", encoding="utf-8")
    return digest


def is_known(home: Home, digest: str) -> bool:
    """Whether convert wrote a file with this digest."""
    return (home.converted / f"{digest}.json").is_file()

"""The folders of runs, data, releases and measurements.

Runs, data and registry are in the current folder; peaks and kernel choices of the machine are in the user's cache.
`--home DIR` puts everything under one folder.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from armillary.errors import NotFound


@dataclass(frozen=True, kw_only=True)
class Home:
    """The folders that commands read and write."""

    work: Path  # runs, data and registry
    cache: Path  # measurements and choices of this machine

    @classmethod
    def default(cls) -> Home:
        """The current folder and ~/.cache/armillary."""
        try:
            user = Path.home()
        except RuntimeError:
            raise NotFound("this user has no home folder to keep measurements in; give --home DIR") from None
        return cls(work=Path.cwd(), cache=user / ".cache" / "armillary")

    @classmethod
    def at(cls, path: str | Path) -> Home:
        """Everything under one folder."""
        folder = Path(os.path.expanduser(path)).absolute()
        return cls(work=folder, cache=folder)

    @property
    def runs(self) -> Path:
        return self.work / "runs"

    @property
    def data(self) -> Path:
        return self.work / "data"

    @property
    def registry(self) -> Path:
        return self.work / "registry"

    @property
    def releases(self) -> Path:
        """Local copies of releases that were loaded."""
        return self.cache / "releases"

    @property
    def peaks(self) -> Path:
        return self.cache / "peaks"

    @staticmethod
    def device_file(folder: Path, device: str) -> Path:
        """'NVIDIA H200' -> FOLDER/nvidia-h200.json."""
        return folder / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"

    @property
    def converted(self) -> Path:
        return self.cache / "converted"

    @property
    def choices(self) -> Path:
        return self.cache / "choices"

"""The command line as a rank that torchrun started, and that hangs: `python -m … FAULT MARK ARGS`.

The fault comes once, so that a rank that is started again gets past it.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

from armillary.cli.main import main
from tests.training.resilience.hanging_rank import _faulty

if __name__ == "__main__":
    fault, mark, *args = sys.argv[1:]
    hangs = os.environ["RANK"] == "1" and not Path(mark).exists()
    with _faulty(fault, Path(mark)) if hangs else nullcontext():
        sys.exit(main(args))

"""Programs of a target (sbatch, squeue, ssh …), run with their errors as one line."""

import shutil
import subprocess
from collections.abc import Sequence

from armillary.errors import ArmillaryError, MissingPart, one_line


class TargetFailed(ArmillaryError):
    """A program of the target refused what it was asked."""


def run_program(command: Sequence[str], *, then: str, text: str = "", timeout_s: float = 60.0) -> str:
    """What the program prints; `text` is its input and `then` the next step where it fails."""
    if shutil.which(command[0]) is None:
        raise MissingPart(f"{command[0]} is not installed here; {then}")
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise TargetFailed(f"{command[0]} has not answered for {timeout_s:g} s; {then}") from None
    if done.returncode:
        said = one_line(done.stderr or done.stdout, 300) or f"exit code {done.returncode}"
        raise TargetFailed(f"{command[0]} refused ({said}); {then}")
    return done.stdout

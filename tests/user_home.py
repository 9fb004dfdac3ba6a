"""A home folder of the test session's own, in which fp32 is this CPU's quickest dtype.

What a machine measured before, or probes while tests keep it busy, decides between fp32 and bf16 where a recipe leaves
the dtype open, and so which tokens come: tests would pass on one CPU and fail on the next. Everything else in the
user's home is there as it is, the compiled C++ kernels too.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from armillary.machine.device_name import device_name
from armillary.profiling.dtypes.rates import PROBE
from armillary.store.home import Home
from armillary.store.peaks import new_peaks, save_peaks

_MARK = ".armillary-tests"
_SLOWER = 0.6
"""16 bits beside fp32: slower, and not so slow that they count as emulated"""


def use_own_home() -> None:
    """For this process and its children; those of a session that has one keep it."""
    user = Path.home()
    if (user / _MARK).exists():
        return
    own = Path(tempfile.mkdtemp(prefix="armillary-tests-home-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    _link(user, own, leave_out=".cache")
    _link(user / ".cache", own / ".cache", leave_out="armillary")
    (user / ".cache" / "armillary" / "native").mkdir(parents=True, exist_ok=True)
    _link(user / ".cache" / "armillary", own / ".cache" / "armillary", only="native")
    (own / _MARK).touch()
    os.environ["HOME"] = str(own)
    for threads in range(1, (os.cpu_count() or 1) + 1):
        shares = {"fp32": 1.0, "bf16": _SLOWER, "fp16": _SLOWER}
        rates = [
            {"dtype": dtype, "flops": share * 1e11, "decode": share * 1e10, "attention": share * 1e10}
            for dtype, share in shares.items()
        ]
        save_peaks(Home.default(), new_peaks(device_name("cpu", threads=threads)).with_points(PROBE, rates))


def _link(source: Path, target: Path, *, leave_out: str = "", only: str = "") -> None:
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir() if source.is_dir() else ():
        if entry.name != leave_out and only in ("", entry.name):
            (target / entry.name).symlink_to(entry)

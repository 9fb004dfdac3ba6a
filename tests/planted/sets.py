"""Which planted runs are for tuning thresholds and which are for judging them.

TUNING: thresholds were, or may have been, chosen so that these come out right. JUDGING: the thresholds that decide them
were in the code before the run was recorded, and have not changed since. What is known (2026-11-17):

- gpu-sync, gpu-short-kernels and gpu-healthy were recorded on an H200 on 2026-11-15, in the commit that introduced
  SYNC_SHARE; the speed-ups from which kernels limit a run were moved a day later with these runs in the test suite.
- gpu-graphs and gpu-no-graphs were recorded in the same commit, but the thresholds that decide them
  (GRAPHS_ROOFLINE_FRACTION, SCHEDULE_SHARE, HOST_BOUND_WAIT_SHARE) are older and unchanged. Both have been in the test
  suite since, so a change that broke them would have been seen: they are held out from tuning, not from sight.
- Live problems at seeds 0 to 2 were run, and their failures mended, at sizes and severities 0.5 to 2. Other seeds were
  not. A new seed of a known problem tests only that thresholds do not hang on one seed's noise.
- Simulated logs and pages (others.py): the rules for them were written with such logs and pages in the tests, without
  noise and at other severities; runs at a drawn seed judge them, as they judge live problems.

A new recording belongs to JUDGING until a threshold is changed because of it; then its name moves to TUNING.
"""

from __future__ import annotations

from typing import Literal

from tests.planted.problem import Problem, Wish

TUNING = ("gpu-sync", "gpu-short-kernels", "gpu-full-memory", "gpu-healthy")
JUDGING = ("gpu-no-graphs", "gpu-graphs")
TUNED_SEEDS = (0, 1, 2)
"""seeds at which live problems were run while thresholds were set"""

Set = Literal["tuning", "judging"]


def set_of(problem: Problem, wish: Wish) -> Set:
    """The set that one run of a problem belongs to."""
    if problem.recorded:
        return "judging" if problem.name in JUDGING else "tuning"
    return "tuning" if wish.seed in TUNED_SEEDS else "judging"

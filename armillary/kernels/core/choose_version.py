"""choose(): the fastest version of an op on this device among those that agree with the reference for a case.

It is called when a model is built or benchmarked, never inside a step. The store remembers the choice; where nothing
may be timed, the first deterministic version in the op's own order is taken.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from math import inf
from pathlib import Path
from typing import Any

import torch

from armillary.errors import ArmillaryError, BadInput
from armillary.kernels.core.agreement import Expected, check, expect
from armillary.kernels.core.dtype import DTYPES
from armillary.kernels.core.op import Case, Op, Version, takes_all
from armillary.kernels.core.requirements import lacking, note_once
from armillary.kernels.core.version_trial import first_line, input_sets, time_version
from armillary.machine.device_name import device_name
from armillary.store.home import Home
from armillary.store.kernel_choices import load_choice, save_choice

BUDGET_S = 0.1
HOPELESS = 4.0  # a version that takes more than this many times the best time so far is timed by one call only
_REST_S = 0.1


@dataclass(frozen=True, kw_only=True)
class VersionTrial:
    """The result of trying one version."""

    version: str
    refused: str = ""  # why it was not tried, or how it failed
    agreed: bool = False  # with the reference, forward and backward
    error: float | None = None  # largest relative error against the wide reference
    forward_s: float | None = None
    backward_s: float | None = None
    method: str = ""

    @property
    def seconds(self) -> float | None:
        return None if self.forward_s is None else self.forward_s + (self.backward_s or 0.0)


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """The version to use, and why."""

    op: str
    case: str
    version: str
    run: Callable[..., Any]  # the function, loaded
    candidates: tuple[VersionTrial, ...]  # one per version
    remembered: bool = False  # whether an earlier run made the choice


def choose(
    op: Op,
    case: Case,
    *,
    home: Home | None = None,
    deterministic: bool = False,
    budget_s: float = BUDGET_S,
    retry: bool = False,
) -> KernelChoice:
    """The version of `op` for `case`; `budget_s` is the time per version and direction; `retry` ignores what is
    remembered."""
    _check(case)
    if deterministic:
        return _chosen(op, case, _without_timing(op, case))
    device = device_name(case.device, threads=torch.get_num_threads())
    choice = None if retry else _remembered(op, case, home, device)
    if choice is None:
        choice = _chosen(op, case, tuple(try_versions(op, case, budget_s=budget_s)))
        _remember(op, case, home, device, choice)
    return choice


def _check(case: Case) -> None:
    """Refuse a case that no version could run."""
    if case.dtype not in DTYPES:
        raise BadInput(f"no kernels for dtype '{case.dtype}'; try one of {', '.join(DTYPES)}")
    kind = case.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise BadInput(f"no kernels for device '{case.device}'; try cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput("torch sees no GPU here to try kernels on; try device='cpu'")


def explain(choice: KernelChoice) -> list[str]:
    """One line per version, the fastest first: its time and error, or why it was refused."""
    order = sorted(choice.candidates, key=lambda t: (not t.agreed, t.seconds is None, t.seconds or 0.0))
    head = f"{choice.op} {choice.case}: {choice.version}" + (" (remembered)" if choice.remembered else "")
    return [head, *(f"  {_reason(trial)}" for trial in order)]


def try_versions(op: Op, case: Case, *, budget_s: float = BUDGET_S, timed: bool = True) -> Iterator[VersionTrial]:
    """Check each version on a small case, and time those that agree; the reference comes last."""
    generator = torch.Generator(torch.device(case.device)).manual_seed(1)
    expected = expect(op, op.inputs(op.small(case), generator), generator)
    sets = input_sets(op, case) if timed else []
    best_s = inf
    for version in op.all_versions:
        if version.run is op.reference and best_s == inf:
            version = replace(version, refuses=takes_all)  # the only one there is
        trial = _trial(op, version, case, sets, expected, budget_s=budget_s, hopeless_s=HOPELESS * best_s)
        best_s = min(best_s, trial.seconds or inf)
        yield trial


def time_rivals(op: Op, case: Case, *, budget_s: float = BUDGET_S) -> Iterator[VersionTrial]:
    """The op's rivals, timed and not checked."""
    sets = input_sets(op, case) if op.rivals else []
    for version in op.rivals:
        yield _trial(op, version, case, sets, budget_s=budget_s)


def _trial(
    op: Op,
    version: Version,
    case: Case,
    sets: list[Any],
    expected: Expected | None = None,
    *,
    budget_s: float,
    hopeless_s: float = inf,
) -> VersionTrial:
    """Check a version where results are expected, and time it on `sets` unless it disagrees."""
    trial = VersionTrial(
        version=version.name, refused=lacking(version.needs, case.device) or version.refuses(case) or ""
    )
    if trial.refused:
        return trial
    try:
        run = version.load()
        if expected is not None:
            agreement = check(run, op, expected, tolerance=op.tolerance.get(case.dtype))
            trial = replace(trial, agreed=agreement.agreed, error=agreement.error, refused=agreement.why_not)
        if trial.refused or not sets:
            return trial
        # GEMMs reach the power limit within a tenth of a second; their ceiling is measured with rests too
        hot = op.work(case).ceiling in ("gemm", "fp8") and torch.device(case.device).type == "cuda"
        rest_s = _REST_S if hot else 0.0
        times = time_version(run, op, sets, budget_s=budget_s, rest_s=rest_s, hopeless_s=hopeless_s, name=version.name)
        return replace(trial, forward_s=times.forward_s, backward_s=times.backward_s, method=times.method)
    except Exception as error:
        # A compiler or a library may fail in its own way on a new chip or shape; the reference is the fallback, and
        # may itself be too large for the memory.
        if version.run is op.reference and not is_out_of_memory(error):
            raise
        failure = f"failed: {type(error).__name__}: {first_line(error)[:200]}"
        return VersionTrial(version=version.name, refused=failure)


def is_out_of_memory(error: Exception) -> bool:
    """torch raises it in two ways."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def _without_timing(op: Op, case: Case) -> tuple[VersionTrial, ...]:
    """In the op's own order, up to the first deterministic version that agrees."""
    candidates: list[VersionTrial] = []
    only = replace(op, versions=tuple(version for version in op.versions if version.deterministic))
    for trial in try_versions(only, case, timed=False):
        candidates.append(trial)
        if trial.agreed:
            break
    return tuple(candidates)


def _chosen(op: Op, case: Case, candidates: tuple[VersionTrial, ...]) -> KernelChoice:
    agreed = [trial for trial in candidates if trial.agreed]
    best = min(agreed, key=lambda t: t.seconds or 0.0).version if agreed else "eager"
    used = {_family(trial.version) for trial in agreed}
    for trial in candidates:
        if not trial.refused or _family(trial.version) in used or _is_plain_absence(op, trial, case):
            continue
        if best == "eager" or _family(trial.version) == "triton" or trial.refused.startswith("failed"):
            note_once(f"{op.name} {case.label}: version {trial.version} is not used: {trial.refused}")
    return _choice(op, case, best, candidates)


def _choice(
    op: Op, case: Case, name: str, candidates: tuple[VersionTrial, ...], *, remembered: bool = False
) -> KernelChoice:
    version = op.version(name)
    assert version is not None
    return KernelChoice(
        op=op.name, case=case.label, version=name, run=version.load(), candidates=candidates, remembered=remembered
    )


def _remembered(op: Op, case: Case, home: Home | None, device: str) -> KernelChoice | None:
    """The stored choice, where it can be read and its version still exists and can run."""
    try:
        record: Any = load_choice(home, device, _key(op, case)) if home else None
        version = op.version(str(record["version"])) if record else None
        candidates = tuple(VersionTrial(**trial) for trial in record["trials"]) if record else ()
    except (ArmillaryError, KeyError, TypeError) as error:
        note_once(f"the stored choices of kernels cannot be used, versions are tried again: {error}")
        return None
    if version is None or lacking(version.needs, case.device) or version.refuses(case):
        return None
    return _choice(op, case, version.name, candidates, remembered=True)


def _remember(op: Op, case: Case, home: Home | None, device: str, choice: KernelChoice) -> None:
    """Store the choice for the next run; a store that cannot be written is no reason to stop this one."""
    if home is None:
        return
    record = {"version": choice.version, "trials": [asdict(trial) for trial in choice.candidates]}
    try:
        save_choice(home, device, _key(op, case), record)
    except ArmillaryError as error:
        note_once(f"the choice of kernels is not stored: {error}")


def _family(version: str) -> str:
    """'triton' of 'triton, pairs': where one of a family works, a failure of another is not reported."""
    return version.partition(",")[0]


def _is_plain_absence(op: Op, trial: VersionTrial, case: Case) -> bool:
    """A requirement that is absent for every shape (no GPU, no Liger) is not reported; triton missing on a GPU is."""
    version = op.version(trial.version)
    if version is None or not lacking(version.needs, case.device):
        return False
    return not ("triton" in version.needs and torch.device(case.device).type == "cuda")


def _key(op: Op, case: Case) -> str:
    return f"{op.name} {case.key} {revision()}"


@cache
def revision() -> str:
    """Versions of torch, triton and CUDA, and a digest of our own kernels; a stored choice is valid for these only."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    cuda = torch.version.cuda or torch.version.hip or "none"
    return f"torch {torch.__version__} triton {_version('triton')} cuda {cuda} kernels {digest.hexdigest()[:12]}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _reason(trial: VersionTrial) -> str:
    if trial.refused:
        return f"{trial.version}: {trial.refused}"
    times = "not timed" if trial.forward_s is None else f"forward {trial.forward_s * 1e6:.1f} µs"
    if trial.backward_s is not None:
        times += f", backward {trial.backward_s * 1e6:.1f} µs"
    return f"{trial.version}: {times}, off by {trial.error:.2g}"

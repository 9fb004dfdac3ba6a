"""`"auto"` dtypes resolved for a training run or a server, and a check of dtypes that were asked for."""

from dataclasses import dataclass, replace

from armillary.profiling.dtypes.rates import RunShape, cluster_rates, run_shape
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout, Precision
from armillary.spec.model import ModelConfig
from armillary.spec.precision import SIXTEEN_BIT, DtypeRates, check_asked, serving_dtype, training_dtype
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.traffic import Traffic
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home

PREFILL_ROWS = 512
"""prefill tokens at which dtypes are compared, where the step budget allows as many"""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A dtype, why auto came to it (empty where it was asked for), and a warning: it is slow here, or auto would
    now differ from what a resumed run keeps."""

    dtype: Precision
    reason: str = ""
    warning: str = ""


def resolve_training(
    layout: Layout, config: ModelConfig, job: TrainJob, cluster: Cluster, home: Home, *, device: str | None = None
) -> Resolved:
    if layout.precision not in ("auto", *SIXTEEN_BIT):
        return Resolved(dtype=layout.precision)
    rows = layout.micro_batch * job.sequence // layout.cp
    rates = cluster_rates(home, cluster, run_shape(config, rows=rows, keys=job.sequence), device=device)
    if layout.precision != "auto":
        return Resolved(dtype=layout.precision, warning=check_asked(layout.precision, rates, "layout.precision"))
    resolved = training_dtype(rates)
    return Resolved(dtype=resolved.dtype, reason=resolved.reason)


def resumed_precision(precision: Precision, now: str) -> Resolved:
    """The precision that a resumed run keeps; `now` is what auto would choose today, and why."""
    return Resolved(
        dtype=precision,
        reason=f"{precision}: as this run was started",
        warning=f"this run keeps {precision}, with which it was started; auto would now take {now}",
    )


def resolve_serving(serve: Serve, rates: DtypeRates, *, stored: str, traffic: Traffic | None = None) -> Resolved:
    """The dtype of a server for a model whose weights are stored in `stored`."""
    if serve.dtype != "auto":
        return Resolved(dtype=serve.dtype, warning=check_asked(serve.dtype, rates, "serve.dtype"))
    usual = traffic or Traffic()
    resolved = serving_dtype(rates, stored=stored, tokens_in=usual.tokens_in, tokens_out=usual.tokens_out)
    return Resolved(dtype=resolved.dtype, reason=resolved.reason)


def serving_shape(config: ModelConfig, serve: Serve) -> RunShape:
    """The shape of an engine's prefill steps."""
    rows = min(PREFILL_ROWS, serve.max_tokens_per_step)
    return run_shape(config, rows=rows, keys=min(serve.max_model_len or config.context, rows))


def with_dtype(serve: Serve, resolved: Resolved) -> Serve:
    """The settings of a server with what was resolved."""
    return replace(serve, dtype=resolved.dtype)  # type: ignore[arg-type]  # neither tf32 nor fp8 is ever resolved to

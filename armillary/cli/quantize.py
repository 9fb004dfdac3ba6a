"""`armillary quantize`: a model in fewer bits, written for transformers, vLLM or llama.cpp, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli import completion
from armillary.cli.open_model import find_model, need_torch
from armillary.cli.output import Output, path_text
from armillary.cli.verb_decorator import device_option, model_code_option, verb
from armillary.store.home import Home
from armillary.units import bytes_text

if TYPE_CHECKING:
    from armillary.model.evaluation.perplexity import Comparison, Interval
    from armillary.model.quantizing.quantize_model import Quantized

FORMATS = ("fp8", "int8", "int4-gptq", "int4-awq", "int4-rtn", "mxfp4", "2:4", "gguf", "gguf-q4_0", "gguf-f16")
_SHOWN = 5  # layers


@verb
@click.argument("model", shell_complete=completion.models)
@click.argument("target", type=click.Path(path_type=Path), metavar="OUT")
@click.option("--to", required=True, type=click.Choice(FORMATS), help="Format of the weights.")
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Text to calibrate and measure on.  [default: Python's standard library]",
)
@click.option("--samples", default=64, show_default=True, type=click.IntRange(1, 4096), help="Windows to calibrate on.")
@click.option("--keep", multiple=True, metavar="PATTERN", help="Modules to leave as they are, like '*.down_proj'.")
@click.option("--group-size", default=128, show_default=True, help="Columns of int4 that share a scale.")
@click.option("--kv", type=click.Choice(["fp8", "int8"]), help="Add scales for a KV cache of that dtype.")
@device_option
@click.option("--overwrite", is_flag=True, help="Replace an existing folder or file.")
@model_code_option
def quantize(
    out: Output,
    home: Home,
    model: str,
    target: Path,
    to: str,
    text: Path | None,
    samples: int,
    keep: tuple[str, ...],
    group_size: int,
    kv: str | None,
    device: str | None,
    overwrite: bool,
) -> None:
    """Write MODEL with quantized weights to the folder OUT (for gguf: a file), and say how much worse it is.

    One block at a time is in memory, so the model may be larger than that. The perplexity of both models is measured
    on text that nothing was calibrated on.
    """
    source = find_model(out, home, model, need_weights=True)
    need_torch("quantizing a model")
    from armillary.model.device import fit_threads, pick_device
    from armillary.model.quantizing.quantize_model import quantize as run

    fit_threads()
    with out.progress(f"quantizing {source.name} to {to}", unit="block") as bar:
        quantized = run(
            source,
            target,
            to,
            text=text,
            keep=keep,
            samples=samples,
            group=group_size,
            kv=kv or "",
            device=pick_device(device),
            overwrite=overwrite,
            progress=bar.at,
        )
    _show(out, quantized)
    out.result(_plain(quantized), quiet=str(target))


def _show(out: Output, quantized: Quantized) -> None:
    share = quantized.bytes / quantized.source_bytes
    sizes = f"{bytes_text(quantized.bytes)}, {share:.0%} of {bytes_text(quantized.source_bytes)}"
    out.say(f"{path_text(quantized.path)} · {sizes}")
    for note in quantized.notes:
        out.warn(note)
    if quantized.comparison is not None:
        show_comparison(out, quantized.comparison, "original", "quantized")
        calibrated = (
            f", after {quantized.calibration_tokens:,} others to calibrate on" if quantized.calibration_tokens else ""
        )
        out.say(
            f"over {quantized.measured_tokens:,} tokens of {quantized.text}{calibrated}; intervals: 95 %, by window"
        )
    worst = [(", ".join(each.modules[:3]), f"{100 * each.error:.2f} %") for each in quantized.errors[:_SHOWN]]
    if worst:
        out.table("layers that changed most (leave some as they are with --keep)", ["module", "relative error"], worst)


def show_comparison(out: Output, comparison: Comparison, reference: str, model: str) -> None:
    rows = [
        (f"perplexity, {reference}", interval_text(comparison.reference)),
        (f"perplexity, {model}", interval_text(comparison.perplexity)),
        ("change", interval_text(comparison.ratio, percent=True)),
        ("KL divergence", f"{interval_text(comparison.kl)} nats per token"),
    ]
    out.fields("", rows)


def interval_text(interval: Interval, *, percent: bool = False) -> str:
    if percent:
        value, low, high = (100 * (each - 1) for each in (interval.value, interval.low, interval.high))
        return f"{value:+.2f} % ({low:+.2f} to {high:+.2f})"
    return f"{interval.value:.4g} ({interval.low:.4g} to {interval.high:.4g})"


def _plain(quantized: Quantized) -> dict[str, Any]:
    errors = [{"modules": each.modules, "relative_error": each.error} for each in quantized.errors]
    return {
        "path": quantized.path,
        "bytes": quantized.bytes,
        "source_bytes": quantized.source_bytes,
        "comparison": quantized.comparison,
        "text": quantized.text,
        "measured_tokens": quantized.measured_tokens,
        "calibration_tokens": quantized.calibration_tokens,
        "layers": errors,
        "notes": quantized.notes,
    }

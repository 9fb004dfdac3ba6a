"""What each format of `armillary quantize` costs in perplexity, on a model trained here.

Exits 1 where one of these does not hold: GPTQ and AWQ lose less than rounding to nearest at 4 bits (of their kind: with
zero points or without); fp8 and int8 lose less than 0.5 %. Every format is calibrated on the first part of the text, if
at all, and measured on the same windows of the rest; inputs of fp8 and int8 are rounded as servers round them, on
windows of the first part.

    armillary train recipes/tour.toml --run m25
    python benchmarks/quantized_quality.py m25 --text FILE [--device cuda]
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from armillary.model.device import fit_threads, pick_device
from armillary.model.evaluation.perplexity import Comparison, compare, model_logits
from armillary.model.evaluation.text_windows import text_windows
from armillary.model.quantizing import compressed_writer, quantization_targets
from armillary.model.quantizing.quantize_model import WINDOW, Quantized, quantize
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.weights.hf_weights import load_model
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model

RTN_ZEROS = "int4-rtn with zeros"  # only here: the fair comparison for AWQ
GROUPS = (128, 32)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("model")
    asked.add_argument("--home")
    asked.add_argument("--text", type=Path, required=True)
    asked.add_argument("--windows", type=int, default=96, help="of 512 tokens, that 4-bit formats are measured on")
    asked.add_argument("--device")
    asked.add_argument("--samples", type=int, default=64)
    given = asked.parse_args()
    fit_threads()
    source = resolve_model(given.model, Home.at(given.home) if given.home else Home.default(), need_weights=True)
    quantization_targets._SPECS[RTN_ZEROS] = replace(quantization_targets._SPECS["int4-rtn"], symmetric=False)
    compressed_writer._FORMATS[RTN_ZEROS] = "pack-quantized"
    losses: dict[tuple[str, int], float] = {}
    print("| format | groups of | bytes | perplexity | change | KL, nats | seconds |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        first, rest = _halves(given.text, Path(folder))
        assert source.folder is not None
        windows = text_windows(Tokenizer.load(source.folder), rest, length=WINDOW, most=given.windows)
        plain = model_logits(load_model(source.folder).eval())
        for to, group in _cases():
            begin = time.monotonic()
            path = Path(folder) / ("m.gguf" if "gguf" in to else "m")
            made = quantize(
                source,
                path,
                to,
                text=first,
                samples=given.samples,
                group=group,
                device=pick_device(given.device),
                overwrite=True,
            )
            found = made.comparison
            if "int4" in to:
                found = compare(model_logits(load_model(path).eval()), plain, windows)
            losses[to, group] = _row(to, group, made, found, time.monotonic() - begin)
    return _judge(losses)


def _cases() -> list[tuple[str, int]]:
    grouped = ("int4-rtn", "int4-gptq", RTN_ZEROS, "int4-awq")
    others = [name for name in quantization_targets.TARGETS if name not in grouped]
    return [(name, group) for group in GROUPS for name in grouped] + [(name, 128) for name in others]


def _halves(text: Path, folder: Path) -> tuple[Path, Path]:
    """Files of the first and the second half of the lines."""
    lines = text.read_text().splitlines(keepends=True)
    paths = folder / "first.txt", folder / "rest.txt"
    for path, part in zip(paths, (lines[: len(lines) // 2], lines[len(lines) // 2 :]), strict=True):
        path.write_text("".join(part))
    return paths


def _row(to: str, group: int, made: Quantized, found: Comparison | None, seconds: float) -> float:
    assert found is not None, "the model needs a tokenizer"
    change, low, high = (100 * (each - 1) for each in (found.ratio.value, found.ratio.low, found.ratio.high))
    print(
        f"| {to} | {group if 'int4' in to else '–'} | {made.bytes / made.source_bytes:.0%} | "
        f"{found.reference.value:.3f} → {found.perplexity.value:.3f} | {change:+.3f} % ({low:+.3f} to {high:+.3f}) | "
        f"{found.kl.value:.5f} | {seconds:.0f} |",
        flush=True,
    )
    return change


def _judge(losses: dict[tuple[str, int], float]) -> int:
    failed = [name for name in ("fp8", "int8") if losses[name, 128] >= 0.5]
    for group in GROUPS:
        for better, plain in (("int4-gptq", "int4-rtn"), ("int4-awq", RTN_ZEROS), ("int4-awq", "int4-rtn")):
            if losses[better, group] >= losses[plain, group]:
                failed.append(f"{better} against {plain} in groups of {group}")
    print("all hold" if not failed else f"do not hold: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

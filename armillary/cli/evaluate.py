"""`armillary eval`: how good a model is, and whether another is worse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli import completion
from armillary.cli.main import BUG
from armillary.cli.open_model import find_model, need_torch, open_model
from armillary.cli.output import Output
from armillary.cli.quantize import interval_text, show_comparison
from armillary.cli.verb_decorator import device_option, model_code_option, verb
from armillary.errors import BadInput
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.model.evaluation.text_windows import TextWindows
    from armillary.model.text.tokenizer import Tokenizer
    from armillary.store.resolve_model import ModelSource


@verb
@click.argument("model", shell_complete=completion.models)
@click.option("--text", type=click.Path(path_type=Path), help="Text to predict.  [default: Python's standard library]")
@click.option("--against", metavar="MODEL2", help="A model of the same tokenizer to compare with.")
@click.option("--windows", default=64, show_default=True, type=click.IntRange(2), help="Most parts of the text.")
@click.option("--window-tokens", default=512, show_default=True, help="Tokens of a part, up to the model's context.")
@click.option("--tasks", default="", metavar="A,B", help="Tasks of lm-eval instead of a text.")
@click.option("--limit", type=click.IntRange(1), help="Most questions per task.")
@click.option("--dtype", help="fp32, bf16 or fp16.  [default: as serve.dtype=auto resolves it]")
@device_option
@model_code_option
def eval_(
    out: Output,
    home: Home,
    model: str,
    text: Path | None,
    against: str | None,
    windows: int,
    window_tokens: int,
    tasks: str,
    limit: int | None,
    dtype: str | None,
    device: str | None,
) -> None:
    """Perplexity of MODEL on a text, or its scores on TASKS; with --against both models and how sure the difference is.

    Exit code 1 says that MODEL is worse than MODEL2 beyond the 95 % interval of a paired bootstrap over windows.
    """
    source = find_model(out, home, model, need_weights=True)
    other = find_model(out, home, against, need_weights=True) if against else None
    need_torch("running a model")
    from armillary.model.device import fit_threads

    fit_threads()
    run = _Run(out=out, home=home, dtype=dtype, device=device)
    if tasks:
        if text is not None:
            raise BadInput("--text and --tasks are two kinds of evaluation; give one of them")
        return run.tasks(model, against, [task for task in tasks.split(",") if task], limit)
    parts = run.windows(source, other, text, windows, window_tokens)
    if against is None:
        run.perplexity(model, parts)
    elif run.compare(model, against, parts):
        click.get_current_context().exit(BUG)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One evaluation."""

    out: Output
    home: Home
    dtype: str | None
    device: str | None

    def windows(
        self, source: ModelSource, other: ModelSource | None, text: Path | None, most: int, length: int
    ) -> TextWindows:
        from armillary.model.evaluation.text_windows import text_windows

        tokenizer = self._tokenizer(source)
        if other is not None and self._tokenizer(other).backend.get_vocab() != tokenizer.backend.get_vocab():
            raise BadInput(f"{source.name} and {other.name} have different tokenizers; compare models of one")
        contexts = [each.config.context for each in (source, other) if each is not None]
        return text_windows(tokenizer, text, length=min(length, *contexts), most=most)

    def _tokenizer(self, source: ModelSource) -> Tokenizer:
        from armillary.model.text.tokenizer import Tokenizer

        if source.files is None or not (source.files / "tokenizer.json").is_file():
            raise BadInput(f"{source.name} has no tokenizer.json; give a model that has one")
        return Tokenizer.load(source.files)

    def _logits(self, model: str) -> Any:
        from armillary.model.evaluation.perplexity import model_logits

        _, loaded = open_model(
            self.out, self.home, model, random_weights=False, dtype=self.dtype, device=self.device, packed=True
        )
        return model_logits(loaded)

    def perplexity(self, model: str, parts: TextWindows) -> None:
        from armillary.model.evaluation.perplexity import perplexity

        logits = self._logits(model)
        with self.out.progress("predicting", unit="window") as bar:
            result = perplexity(logits, parts, bar.at)
        self.out.say(f"perplexity {interval_text(result)} {self._over(parts)}")
        self.out.result({"perplexity": result} | _about(parts), quiet=f"{result.value:.6g}")

    def compare(self, model: str, against: str, parts: TextWindows) -> bool:
        """Whether the model is worse."""
        from armillary.model.evaluation.perplexity import compare

        logits, reference = self._logits(model), self._logits(against)
        with self.out.progress("predicting", unit="window") as bar:
            result = compare(logits, reference, parts, bar.at)
        show_comparison(self.out, result, against, model)
        verdict = "worse" if result.is_worse else "better" if result.ratio.high < 1 else "no worse and no better"
        self.out.say(f"{model} is {verdict} than {against} {self._over(parts)}")
        self.out.result({"comparison": result, "is_worse": result.is_worse} | _about(parts), quiet=verdict)
        return bool(result.is_worse)

    def _over(self, parts: TextWindows) -> str:
        return f"over {len(parts) * parts.predicted:,} tokens of {parts.origin} (95 % intervals, by window)"

    def tasks(self, model: str, against: str | None, names: list[str], limit: int | None) -> None:
        from armillary.engine.lm_eval_model import need_lm_eval

        need_lm_eval()
        result = {each: self._scores(each, names, limit) for each in (model, against) if each}
        rows = [
            (task, metric, *(scores[task].get(metric) for scores in result.values()))
            for task, metrics in result[model].items()
            for metric in metrics
        ]
        self.out.table("", ["task", "metric", *result], rows)
        self.out.result(result, quiet=[f"{row[0]} {row[1]} {row[2]}" for row in rows])

    def _scores(self, model: str, names: list[str], limit: int | None) -> dict[str, Any]:
        from armillary.engine.llm import LLM
        from armillary.engine.lm_eval_model import run_tasks

        with (
            self.out.progress(f"putting tasks to {model}"),
            LLM(model, home=self.home, dtype=self.dtype, device=self.device) as llm,
        ):
            return run_tasks(llm, names, limit=limit)


def _about(parts: TextWindows) -> dict[str, Any]:
    return {"text": parts.origin, "windows": len(parts), "tokens": len(parts) * parts.predicted}

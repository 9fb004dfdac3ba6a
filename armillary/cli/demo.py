"""`armillary demo`: prepare, train, save and generate on this machine, in about a minute and a half."""

from __future__ import annotations

from pathlib import Path

import click

from armillary.cli.generate import stream_completion
from armillary.cli.output import Output
from armillary.cli.train import begin, run_training
from armillary.cli.verb import set_option, verb
from armillary.spec.recipe import load_recipe
from armillary.store.home import Home

_RECIPE = Path(__file__).parent / "demo.toml"
_PROMPTS = ("def read_lines(path):\n", "class Queue:\n", "import ")


@verb
@set_option
@click.option("--max-tokens", default=48, show_default=True, help="Length of each sample at the end.")
def demo(out: Output, home: Home, overrides: tuple[str, ...], max_tokens: int) -> None:
    """Train a small model on the Python standard library, save it, and let it write.

    Needs no download. The recipe is printed by --json, and recipes/ has larger ones.
    """
    begun = begin(out, home, load_recipe(_RECIPE, overrides))
    done = run_training(out, begun, text=_RECIPE.read_text(), overrides=overrides)
    if not done["export"]:
        raise KeyboardInterrupt  # stopped half-way: there is nothing to write with yet
    samples = write_samples(out, Path(done["export"]), max_tokens)
    out.say(f"\nmore: armillary generate {done['run']}  ·  armillary runs  ·  armillary models  ·  armillary doctor")
    out.result(done | {"samples": samples, "recipe": _RECIPE.read_text()}, quiet=done["run"])


def write_samples(out: Output, folder: Path, max_tokens: int) -> list[str]:
    """The saved model, loaded again from its folder, on a few prompts."""
    from armillary.model.generate import Sampling
    from armillary.model.tokenizer import Tokenizer
    from armillary.model.weights import load_model

    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    texts = []
    for prompt in _PROMPTS:
        out.say()
        sampling = Sampling(max_tokens=max_tokens, temperature=0.5, top_p=0.9)
        made = stream_completion(out.stream, model, tokenizer, prompt, sampling, special=True, before=f"» {prompt}")
        out.say()
        texts.append(prompt + made.text)
    return texts

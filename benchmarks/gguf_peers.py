"""Greedy tokens of a model in GGUF, compared with llama.cpp's, for every format that both read.

    armillary train recipes/tour.toml --run m25
    python benchmarks/gguf_peers.py m25 [--prompts 10] [--tokens 64] [--formats F16,Q8_0,…] [--json]

The F16 file is ours; the others are made from it by `llama_model_quantize`, the function behind `llama-quantize`. Both
sides get the same token ids and keep their KV caches in fp32, llama.cpp without flash attention, which would round its
own. Exits 1 where a format does not hold: tokens are equal on 9 of 10 prompts, and where they part, llama.cpp's two
best logits are within 0.1 of each other. The last column says how often llama.cpp agrees with itself as it runs by
default, with flash attention and a KV cache in fp16: with inputs rounded to 8 bits, a change in the last place of one
number moves a code, which moves others in every later layer, and near ties are decided anew.

Needs `llama-cpp-python`; `make peers` builds it.
"""

import argparse
import ctypes
import json
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NEAR = 0.1  # logits of llama.cpp that count as equal: it rounds activations to 8 bits
ENOUGH = 0.9  # of all prompts
PROMPT_TOKENS = 32
FILE_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18}
"""llama_ftype; of K-quants the medium mix, which is the one that is published"""
FORMATS = ("F16", *FILE_TYPES)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One format."""

    format: str
    prompts: int
    equal: int
    gaps: list[float]  # between llama.cpp's two best logits, at the first token that differs
    itself: int  # prompts on which llama.cpp equals itself as it runs by default

    @property
    def holds(self) -> bool:
        return self.equal >= ENOUGH * self.prompts and all(gap <= NEAR for gap in self.gaps)


def write_files(model: str, home: str | None, folder: Path, formats: list[str]) -> tuple[dict[str, Path], Any]:
    """A file for each format, and the model they are made of."""
    from armillary.model.quantizing.quantize_model import quantize
    from armillary.store.home import Home
    from armillary.store.resolve_model import resolve_model

    source = resolve_model(model, Home.at(home) if home else Home.default(), need_weights=True)
    files = {"F16": folder / "F16.gguf"}
    quantize(source, files["F16"], "gguf-f16", samples=4)
    for each in formats:
        if each != "F16":
            files[each] = folder / f"{each}.gguf"
            quantize_file(files["F16"], files[each], each)
    return {each: files[each] for each in formats}, source


def quantize_file(path: Path, target: Path, format: str) -> None:
    """As `llama-quantize PATH TARGET FORMAT` does."""
    llama = load_llama()
    wanted = llama.llama_model_quantize_default_params()
    wanted.ftype, wanted.nthread = FILE_TYPES[format], 2
    if llama.llama_model_quantize(str(path).encode(), str(target).encode(), ctypes.byref(wanted)) != 0:
        raise SystemExit(f"llama.cpp could not make {format} of {path}")


def load_llama() -> Any:
    """The library, silent."""
    try:
        import llama_cpp as llama
    except ImportError:
        raise SystemExit("llama-cpp-python is not installed; run: make peers") from None
    if not hasattr(load_llama, "silent"):
        load_llama.silent = llama.llama_log_callback(lambda level, text, data: None)  # type: ignore[attr-defined]
        llama.llama_log_set(load_llama.silent, None)  # type: ignore[attr-defined]
        llama.llama_backend_init()
    return llama


def their_tokens(
    path: Path, prompts: list[list[int]], most: int, threads: int, *, default: bool = False
) -> list[list[tuple[int, float]]]:
    """Greedy tokens by prompt, each with the gap between its logit and the second best."""
    import numpy as np

    llama = load_llama()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot read {path}")
    wanted = llama.llama_context_default_params()
    wanted.n_ctx, wanted.n_threads, wanted.n_threads_batch = PROMPT_TOKENS + most + 8, threads, threads
    if not default:
        wanted.type_k = wanted.type_v = llama.GGML_TYPE_F32
        wanted.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, wanted)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def next_token(tokens: list[int]) -> tuple[int, float]:
        ids = (llama.llama_token * len(tokens))(*tokens)  # the batch points to it
        assert llama.llama_decode(context, llama.llama_batch_get_one(ids, len(tokens))) == 0
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), shape=(vocab,))
        second, best = np.partition(logits, -2)[-2:]
        return int(logits.argmax()), float(best - second)

    made = []
    for prompt in prompts:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        answer = [next_token(prompt)]
        while len(answer) < most:
            answer.append(next_token([answer[-1][0]]))
        made.append(answer)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return made


def our_tokens(path: Path, prompts: list[list[int]], most: int, threads: int) -> list[list[int]]:
    from armillary import LLM, SamplingParams
    from armillary.spec.tables.serve import Serve

    llm = LLM(
        path,
        Serve(dtype="fp32", max_running=len(prompts), max_model_len=PROMPT_TOKENS + most, threads=threads),
        device="cpu",
    )
    made = llm.generate(prompts, SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True))
    return [each.tokens for each in made]


def compare(path: Path, format: str, prompts: list[list[int]], most: int, threads: int) -> Compared:
    equal, gaps = 0, []
    theirs, ours = their_tokens(path, prompts, most, threads), our_tokens(path, prompts, most, threads)
    for answer, tokens in zip(theirs, ours, strict=True):
        apart = [gap for (token, gap), mine in zip(answer, tokens, strict=True) if token != mine]
        equal += not apart
        gaps += apart[:1]
    again = their_tokens(path, prompts, most, threads, default=True)
    itself = sum([token for token, _ in a] == [token for token, _ in b] for a, b in zip(theirs, again, strict=True))
    return Compared(format=format, prompts=len(prompts), equal=equal, gaps=gaps, itself=itself)


def row(each: Compared) -> str:
    gaps = ", ".join(f"{gap:.3f}" for gap in each.gaps) or "–"
    holds = "yes" if each.holds else "no"
    return f"| {each.format} | {each.equal} of {each.prompts} | {gaps} | {holds} | {each.itself} of {each.prompts} |"


def draw_prompts(source: Any, count: int) -> list[list[int]]:
    """Token ids of text where the model has a tokenizer, else any."""
    from armillary.model.text.tokenizer import Tokenizer

    dice = random.Random(0)
    if not (source.folder / "tokenizer.json").is_file():
        return [[dice.randrange(source.config.vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    ids = Tokenizer.load(source.folder).encode(Path(argparse.__file__).read_text())
    return [ids[first : first + PROMPT_TOKENS] for first in dice.sample(range(len(ids) - PROMPT_TOKENS), count)]


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("model")
    asked.add_argument("--home")
    asked.add_argument("--prompts", type=int, default=10)
    asked.add_argument("--tokens", type=int, default=64)
    asked.add_argument("--formats", default=",".join(FORMATS))
    asked.add_argument("--threads", type=int, default=2)
    asked.add_argument("--json", action="store_true")
    given = asked.parse_args()
    formats = given.formats.split(",")
    if unknown := set(formats) - set(FORMATS):
        raise SystemExit(f"unknown formats {', '.join(sorted(unknown))}; these are: {', '.join(FORMATS)}")
    with tempfile.TemporaryDirectory() as folder:
        files, source = write_files(given.model, given.home, Path(folder), formats)
        prompts = draw_prompts(source, given.prompts)
        if not given.json:
            print("| format | prompts with equal tokens | logit gaps where they part | holds | llama.cpp with itself |")
            print("|---|---|---|---|---|")
        found = []
        for format, path in files.items():
            found.append(compare(path, format, prompts, given.tokens, given.threads))
            if not given.json:
                print(row(found[-1]), flush=True)
    if given.json:
        print(json.dumps([asdict(each) | {"holds": each.holds} for each in found]))
    return not all(each.holds for each in found)


if __name__ == "__main__":
    sys.exit(main())

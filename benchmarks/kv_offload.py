"""Conversations that need five times the device's KV cache: time to first token with and without host memory for it.

    python benchmarks/kv_offload.py                       # a small model with random weights, on a CPU
    python benchmarks/kv_offload.py FOLDER --device cuda  # any model

Conversations take turns: each sends its whole history and some new tokens, then waits until all others have had their
turn, so that its blocks are evicted meanwhile. The same requests run once with recomputation and once with
`serve.kv_host_bytes`; outputs are compared token by token. A last run preempts requests, with and without swapping.
On a CPU, the device's and the host's blocks are two pools of the same memory, and a load is a copy within it.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from armillary.spec.model import LayerKind, ModelConfig
from armillary.spec.tables.serve import Serve

_MODEL = ModelConfig(
    name="model",
    hidden=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    ffn=1536,
    vocab=4096,
    context=4096,
    layers=(LayerKind(),) * 8,
)
_BLOCK = 16
_NEW, _OUT = 32, 8  # tokens of a turn, and of its answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1024, help="length of a conversation after its first turn")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as where:
        folder = given.folder
        if folder is None:
            folder = save_model(build(_MODEL, dtype=torch.float32, device="cpu", seed=1), Path(where) / "model")
        longest = given.tokens + (given.turns + 1) * (_NEW + _OUT)
        whole = given.conversations * longest
        print(f"{given.conversations} conversations, {longest:,} tokens each at the end: {whole:,} tokens")
        rows = {host: conversations(folder, given, whole, host) for host in (False, True)}
        same = rows[False]["tokens"] == rows[True]["tokens"]
        first, second = rows[False]["ttft_s"], rows[True]["ttft_s"]
        print(f"TTFT p50 of later turns: {first * 1e3:,.1f} ms recomputed, {second * 1e3:,.1f} ms with host memory")
        print(f"{second / first:.3f} of recomputation's; tokens {'equal' if same else 'DIFFER'}")
        swapped = {host: preempted(folder, given, host) for host in (False, True)}
        same_too = swapped[False]["tokens"] == swapped[True]["tokens"]
        print(f"preempted: {'equal' if same_too else 'DIFFERENT'} tokens with swapping")
        assert same and same_too


def engine(folder: Path, given: Any, tokens: int, host_tokens: int, record: Any, **more: Any) -> LLM:
    serve = Serve(block_tokens=_BLOCK, max_running=16, dtype="fp32" if given.device == "cpu" else "auto", **more)
    sizes = LLM(folder, Serve(block_tokens=_BLOCK, kv_bytes=64_000_000), device=given.device).plan
    per_token = sizes.block_bytes * len(sizes.groups) / _BLOCK
    serve = replace(serve, kv_bytes=int((tokens + _BLOCK) * per_token), kv_host_bytes=int(host_tokens * per_token))
    return LLM(folder, serve, device=given.device, record=record)


def conversations(folder: Path, given: Any, whole: int, host: bool) -> dict[str, Any]:
    requests: list[dict[str, float]] = []
    steps: list[dict[str, float]] = []

    def record(gauges: Any, *, step: int | None = None, request: str | None = None) -> None:
        (requests if request is not None else steps).append(dict(gauges))

    llm = engine(folder, given, whole // 5, whole if host else 0, record)
    print(llm.plan.text((given.tokens,)))
    offload = llm.engine.scheduler.cache.offload
    if offload is not None:
        costs = offload.costs
        print(f"a block loads in {costs.block_s * 1e6:,.0f} µs; a token is computed in {costs.token_s * 1e6:,.0f} µs")
    dice = torch.Generator().manual_seed(1)
    vocab = llm.engine.scheduler.settings.vocab

    def drawn(count: int) -> list[int]:
        return torch.randint(5, vocab, (count,), generator=dice).tolist()  # type: ignore[no-any-return]

    texts = [drawn(given.tokens) for _ in range(given.conversations)]
    params, tokens = SamplingParams(max_tokens=_OUT, temperature=0.0, ignore_eos=True), []
    for turn in range(1 + given.turns):
        if turn == 1:
            requests.clear()
        for at, text in enumerate(texts):
            (made,) = llm.generate([text], params)
            assert made.error == "", made.error
            tokens.append(made.tokens)
            texts[at] = text + made.tokens + drawn(_NEW)
    later = [each for each in requests if "ttft_s" in each]
    found = sum(each["cached_tokens"] for each in later) / sum(each["tokens_in"] for each in later)
    state = llm.engine.state()
    print(
        f"  found {found:.0%} of later prompts; blocks to the host {state.get('kv_offloaded_total', 0):,}, "
        f"back {state.get('kv_loaded_total', 0):,}"
    )
    llm.close()
    return {"ttft_s": median(each["ttft_s"] for each in later), "tokens": tokens}


def preempted(folder: Path, given: Any, host: bool) -> dict[str, Any]:
    """16 requests that grow to four times what the device holds."""
    steps: list[Any] = []
    tokens = 16 * 256
    llm = engine(
        folder, given, tokens // 4, tokens if host else 0, lambda gauges, **_: steps.append(gauges), max_model_len=512
    )
    dice = torch.Generator().manual_seed(2)
    prompts = [torch.randint(5, 4000, (64,), generator=dice).tolist() for _ in range(16)]
    params = SamplingParams(max_tokens=192, temperature=0.0, ignore_eos=True)
    llm.engine.scheduler.admission.learns, llm.engine.scheduler.admission.reserve = False, 0.0
    made = llm.generate(prompts, params)
    state = llm.engine.state()
    print(f"  preemptions {state['preemptions_total']:.0f}; swapped in {state.get('kv_swapped_in_total', 0):,} tokens")
    assert state["preemptions_total"]
    llm.close()
    return {"tokens": [each.tokens for each in made]}


if __name__ == "__main__":
    main()

"""Requests for engine benchmarks: random tokens, fixed or random lengths, from a seed."""

from random import Random

from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams


def fixed(
    count: int, *, tokens_in: int, tokens_out: int, vocab: int, seed: int = 0, name: str = "r", temperature: float = 0.0
) -> list[Request]:
    """`count` requests of equal length; none ends early."""
    rng = Random(seed)
    return [
        _request(f"{name}{i}", [rng.randrange(vocab) for _ in range(tokens_in)], tokens_out, temperature)
        for i in range(count)
    ]


def ragged(count: int, *, most_in: int, most_out: int, vocab: int, seed: int = 0) -> list[Request]:
    """Prompts and outputs of a tenth of the maximum to the maximum; none ends early."""
    rng = Random(seed)
    return [
        _request(
            f"r{i}",
            [rng.randrange(vocab) for _ in range(rng.randint(max(1, most_in // 10), most_in))],
            rng.randint(max(1, most_out // 10), most_out),
            0.6,
        )
        for i in range(count)
    ]


def nano_vllm(count: int = 256, *, least: int = 100, most: int = 1024, vocab: int = 10_000) -> list[Request]:
    """The public benchmark of nano-vllm (bench.py): seed 0, 100 to 1,024 tokens in and out, temperature 0.6; 133,966
    tokens out."""
    rng = Random(0)
    prompts = [[rng.randint(0, vocab) for _ in range(rng.randint(least, most))] for _ in range(count)]
    return [_request(f"r{i}", prompt, rng.randint(least, most), 0.6) for i, prompt in enumerate(prompts)]


def _request(name: str, prompt: list[int], tokens_out: int, temperature: float) -> Request:
    params = SamplingParams(max_tokens=tokens_out, ignore_eos=True, temperature=temperature, seed=0)
    return Request(id=name, prompt=prompt, params=params)

"""Prompts and answers a second on a CPU, beside llama.cpp: the same random Llama, the same prompt, greedy, one stream.

    python benchmarks/cpu_peers.py [--kinds int8,Q8_0] [--rounds 5] [--threads 2] [--prompt 512] [--answer 64] [--json]
    python benchmarks/cpu_peers.py --cpu-time   # one thread, its CPU time: what a busy machine can tell

Needs `gguf` and `llama-cpp-python` (`make peers` builds it). Every contestant is a process of its own with its model
loaded; they run one after the other, round after round, so that what else the machine does hits all alike. The best
round counts. A decoded token reads every weight once but the input embedding: bytes a second say how far memory goes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 2048,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
"""134M weights, 109M of which a token is multiplied by"""
OURS, THEIRS = ("fp32", "bf16", "int8", "int4", "our-Q8_0", "our-Q4_0"), ("F32", "F16", "BF16", "Q8_0", "Q4_0")
BYTES = {
    "fp32": 4,
    "bf16": 2,
    "int8": 1,
    "int4": 0.5 + 4 / 128,
    "our-Q8_0": 34 / 32,
    "our-Q4_0": 18 / 32,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "Q8_0": 34 / 32,
    "Q4_0": 18 / 32,
}
"""of a weight; int8 and int4 keep the head in 16 or 32 bits; our-… is the same file in our engine"""
TO = {"int8": "int8", "int4": "int4-rtn"}
"""kind -> format of `armillary quantize`"""
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
Clock = Callable[[], float]
Answer = Callable[[list[int], int], tuple[float, float, list[int]]]
"""(prompt, tokens wanted) -> seconds of the prompt, seconds of the rest, tokens"""


# --- the model, as each side reads it


def make_model(folder: Path) -> None:
    """A Llama with random weights that bf16 holds exactly, as a Hugging Face folder."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, rms_norm_eps=1e-5, tie_word_embeddings=False, initializer_range=0.05)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """The folder's weights as a GGUF file without a vocabulary."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("no_vocab")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        value = tensor.float().numpy()
        module = name.removesuffix(".weight")
        turning = heads.get(module.split(".")[-1])
        if turning:  # llama.cpp turns neighbours, Hugging Face halves
            value = value.reshape(turning, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        form = gguf.GGMLQuantizationType["F32" if value.ndim == 1 else kind]
        out.add_tensor(_gguf_name(module) + ".weight", gguf.quants.quantize(value, form), raw_dtype=form)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_quantized(source: Path, folder: Path, to: str) -> None:
    """As `armillary quantize SOURCE FOLDER --to TO` does."""
    from armillary.model.quantizing.quantize_model import quantize
    from armillary.store.home import Home
    from armillary.store.resolve_model import resolve_model

    quantize(resolve_model(str(source), Home.default(), need_weights=True), folder, to)


def _gguf_name(module: str) -> str:
    if not module.startswith("model.layers."):
        return NAMES[module]
    number, rest = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{NAMES[rest]}"


# --- the two sides


def ours(folder: Path, kind: str, threads: int, clock: Clock) -> Answer:
    import torch

    from armillary import LLM, SamplingParams
    from armillary.engine.request.request import Request
    from armillary.spec.tables.serve import Serve

    torch.set_num_threads(threads)
    serve = Serve(max_running=1, max_model_len=1024, prefix_cache=False, threads=threads)
    engine = LLM(folder, serve, dtype=kind if kind in ("fp32", "bf16") else None, device="cpu").engine

    def answer(prompt: list[int], most: int) -> tuple[float, float, list[int]]:
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        engine.scheduler.submit(Request(id="one", prompt=prompt, params=params), engine.loop.clock())
        begin, first, tokens = clock(), 0.0, []
        while engine.busy:
            for piece in engine.step():
                tokens += piece.tokens
                first = first or clock()
        return first - begin, clock() - first, tokens

    return answer


def theirs(path: Path, kind: str, threads: int, clock: Clock) -> Answer:
    import llama_cpp as llama
    import numpy as np

    silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    wish = llama.llama_context_default_params()
    wish.n_ctx, wish.n_batch, wish.n_threads, wish.n_threads_batch = 1024, 1024, threads, threads
    if kind == "F32":  # attention too, which goes through F16 by default
        wish.type_k = wish.type_v = llama.GGML_TYPE_F32
        wish.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, wish)

    def next_token(tokens: list[int]) -> int:
        ids = (llama.llama_token * len(tokens))(*tokens)  # the batch points to it
        assert llama.llama_decode(context, llama.llama_batch_get_one(ids, len(tokens))) == 0
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), shape=(SHAPE["vocab_size"],))
        return int(logits.argmax())

    def answer(prompt: list[int], most: int, _keep: Any = silent) -> tuple[float, float, list[int]]:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        begin = clock()
        tokens = [next_token(prompt)]
        first = clock()
        while len(tokens) < most:
            tokens.append(next_token(tokens[-1:]))
        return first - begin, clock() - first, tokens

    return answer


# --- one process each


def work(kind: str, source: Path, threads: int, cpu_time: bool) -> None:
    """Answer what comes on stdin, a line each."""
    clock = time.thread_time if cpu_time else time.perf_counter
    answer = (ours if kind in OURS else theirs)(source, kind, threads, clock)
    answer(list(range(2, 34)), 4)
    print("ready", flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        print(json.dumps(answer(wanted["prompt"], wanted["most"])), flush=True)


class Contestant:
    """A process that answers."""

    def __init__(self, kind: str, source: Path, threads: int, cpu_time: bool) -> None:
        command = [sys.executable, __file__, "--worker", kind, "--source", str(source), "--threads", str(threads)]
        command += ["--cpu-time"] if cpu_time else []
        self.kind, self.prompt_s, self.token_s, self.tokens = kind, [], [], []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._read() != "ready":
            raise SystemExit(f"{kind} did not start")

    def run(self, prompt: list[int], most: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "most": most}) + "\n")
        self._process.stdin.flush()
        prompt_s, rest_s, self.tokens = json.loads(self._read())
        self.prompt_s.append(prompt_s / len(prompt))
        self.token_s.append(rest_s / (most - 1))

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.kind} ended with {self._process.wait()}")
        return line.strip()

    def row(self) -> dict[str, Any]:
        hidden, ffn, vocab = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
        layers = SHAPE["num_hidden_layers"] * (4 * hidden * hidden + 3 * hidden * ffn) * BYTES[self.kind]
        read = layers + vocab * hidden * (2 if self.kind in TO else BYTES[self.kind])
        return {
            "kind": self.kind,
            "prompt_tokens_per_s": 1 / min(self.prompt_s),
            "decode_tokens_per_s": 1 / min(self.token_s),
            "read_bytes_per_s": read / min(self.token_s),
            "tokens": self.tokens,
        }

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every contestant's row."""
    dice = random.Random(0)
    prompt = [dice.randrange(SHAPE["vocab_size"]) for _ in range(options.prompt)]
    running = []
    for kind in options.kinds.split(","):
        form = kind.removeprefix("our-")
        path = folder / f"{form}.gguf" if form in THEIRS else folder
        if form in THEIRS and not path.exists():
            write_gguf(folder, path, form)
        elif kind in TO:
            path = folder / kind
            if not path.exists():
                write_quantized(folder, path, TO[kind])
        running.append(Contestant(kind, path, options.threads, options.cpu_time))
    for _ in range(options.rounds):
        for one in running:
            one.run(prompt, options.answer)
    for one in running:
        one.end()
    return [one.row() for one in running]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--kinds", default=",".join((*OURS, *THEIRS)), help="who takes part, by comma")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the models are kept between runs")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, its CPU time")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.threads = 1 if options.cpu_time else options.threads
    if options.worker:
        return work(options.worker, options.source, options.threads, options.cpu_time)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_model(folder)
        rows = compare(folder, options)
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{options.threads} threads, {options.prompt} tokens in, {options.answer} out, best of {options.rounds}")
    for row in rows:
        side = "armillary" if row["kind"] in OURS else "llama.cpp"
        print(
            f"{side} {row['kind']:<5} prompt {row['prompt_tokens_per_s']:7.0f} tokens/s   decode "
            f"{row['decode_tokens_per_s']:6.1f} tokens/s = {row['read_bytes_per_s'] / 1e9:5.1f} GB/s"
        )


if __name__ == "__main__":
    main()

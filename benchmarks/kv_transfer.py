"""Bandwidth of KV blocks from a prefill to a decode process, beside a plain copy of as many bytes over the same path.

    python benchmarks/kv_transfer.py                       # random weights, two processes on this machine
    python benchmarks/kv_transfer.py --tokens 4096 --repeats 7 --only shared

shared  through memory that both processes map, as servers on one host do
sent    through one TCP connection, as between two hosts

A prompt is computed once, so that the prefill side's prefix cache has all of its blocks but the last. Then the decode
side asks for it, forgets it, and asks again. A transfer is timed from the first frame of blocks in the decode side's
cache to the last, with the bytes in between, so that the computing of the last block is left out; what a request waits
in all, that included, is printed beside it. The copy moves as many bytes that lie ready in one process into memory of
another, 4 MiB at a time: through as many shared slots as are in use at once, or through one TCP connection. The last
line is all figures as JSON.
"""

import argparse
import json
import multiprocessing
import socket
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from armillary.engine.disaggregation.block_bytes import BlockBytes
from armillary.engine.disaggregation.roles import connect
from armillary.engine.disaggregation.shared_memory import SharedFrames, SharedSlots
from armillary.engine.engine_thread import EngineThread
from armillary.engine.llm import LLM
from armillary.engine.output.output_text import OutputDelta
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from armillary.spec.model import LayerKind, ModelConfig
from armillary.spec.tables.serve import Serve

_FRAME = 1 << 22
_SLOTS = 16
_OPENED = SharedFrames.opened.__func__  # type: ignore[attr-defined]


class Written:
    """When the decode side had written its blocks, and how many bytes."""

    def __init__(self) -> None:
        self.at: list[tuple[float, int]] = []
        write = BlockBytes.write

        def timed(blocks: BlockBytes, targets: list[int], data: memoryview, *given: Any) -> None:
            write(blocks, targets, data, *given)
            self.at.append((time.monotonic(), len(data)))

        BlockBytes.write = timed  # type: ignore[method-assign]

    def bytes_per_s(self) -> float:
        """Between the first and the last frame."""
        (begin, _), *others = self.at
        return sum(size for _, size in others) / (others[-1][0] - begin)


def config(tokens: int) -> ModelConfig:
    """64 KiB of keys and values per token in fp32, and little to compute."""
    layers = (LayerKind(),) * 8
    shape = {"hidden": 256, "heads": 8, "kv_heads": 8, "head_dim": 128, "ffn": 256, "vocab": 512}
    return ModelConfig(name="model", context=2 * tokens, layers=layers, **shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="shared,sent")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as where:
        folder = save_model(build(config(given.tokens), dtype=torch.float32, device="cpu", seed=1), Path(where) / "m")
        ours, theirs = start.Pipe()
        process = start.Process(target=prefill, args=(folder, given.tokens, theirs), daemon=True)
        process.start()
        address, rows = ours.recv(), []
        for path in given.only.split(","):
            rates, num_bytes = decode(folder, given.tokens, address, given.repeats, path)
            rows.append(figures(path, rates, copied(num_bytes, given.repeats, path), num_bytes))
        process.kill()
        process.join()
    print(json.dumps(rows))


def figures(path: str, rates: list[float], copies: list[float], num_bytes: int) -> dict[str, object]:
    for name, found in (("transfer", rates), ("plain copy", copies)):
        each = " ".join(f"{rate / 1e9:.2f}" for rate in found)
        print(f"{path}: {name} of {num_bytes / 1e6:.1f} MB, median {median(found) / 1e9:.2f} GB/s ({each})", flush=True)
    share = median(rates) / median(copies)
    print(f"{path}: {share:.0%} of the copy", flush=True)
    figure = {"bytes": num_bytes, "bytes_per_s": median(rates), "copy_bytes_per_s": median(copies)}
    return {"path": path} | {key: round(value) for key, value in figure.items()} | {"share": round(share, 3)}


def copied(num_bytes: int, repeats: int, path: str) -> list[float]:
    """bytes/s of plain copies."""
    start = multiprocessing.get_context("spawn")
    ours, theirs = start.Pipe()
    process = start.Process(target=send_plainly, args=(num_bytes, repeats, path, theirs), daemon=True)
    process.start()
    rates = receive_plainly(num_bytes, ours.recv(), repeats, path)
    process.join()
    return rates


def settings(role: str, address: str, tokens: int) -> Serve:
    return Serve(
        role=role,  # type: ignore[arg-type]
        prefill=address,
        dtype="fp32",
        threads=1,
        max_running=1,
        max_model_len=tokens + 64,
        kv_bytes=(tokens + 256) * 65_536,
    )


def prefill(folder: Path, tokens: int, pipe: Connection) -> None:
    """In a process: a prefill side, until it is killed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    serve = settings("prefill", address, tokens)
    llm = LLM(folder, serve, device="cpu")
    connect(llm.engine, EngineThread(llm.engine).start(), serve, folder)
    pipe.send(address)
    threading.Event().wait()


def decode(folder: Path, tokens: int, address: str, repeats: int, path: str) -> tuple[list[float], int]:
    """(bytes/s of each transfer, bytes of one)."""
    SharedFrames.opened = classmethod(_OPENED if path == "shared" else lambda cls, offer: None)  # type: ignore
    serve = settings("decode", address, tokens)
    llm = LLM(folder, serve, device="cpu")
    worker = EngineThread(llm.engine).start()
    side = connect(llm.engine, worker, serve, folder)
    prompt = torch.randint(0, 512, (tokens + 1,), generator=torch.Generator().manual_seed(5)).tolist()
    seconds, rates, num_bytes, written = [], [], 0, Written()
    while not side.gauges()["prefill_connected"]:
        time.sleep(0.01)
    for repeat in range(repeats + 1):
        before, written.at = side.gauges(), []
        request(worker, prompt, f"request {repeat}")
        after = side.gauges()
        assert after["kv_fetched_total"] == before["kv_fetched_total"] + 1, (
            "the prompt did not come from the other side"
        )
        seconds.append(after["kv_fetch_wait_s_total"] - before["kv_fetch_wait_s_total"])
        rates.append(written.bytes_per_s())
        num_bytes = int(after["kv_received_bytes_total"] - before["kv_received_bytes_total"])
        worker.between_steps(llm.engine.scheduler.cache.prefix_cache.clear)
    side.close()
    worker.stop()
    print(f"first      {seconds[0]:.2f} s with {tokens:,} tokens computed; their blocks were sent meanwhile")
    print(f"again      {median(seconds[1:]):.2f} s with their last block computed")
    return rates[1:], num_bytes


def request(worker: EngineThread, prompt: list[int], name: str) -> None:
    """Serve one request, and wait for its end."""
    over = threading.Event()

    def deliver(delta: OutputDelta) -> None:
        if delta.finish is not None:
            over.set()

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    worker.submit(Request(id=name, prompt=prompt, params=params), deliver)
    assert over.wait(120), "the request never ended"


def send_plainly(num_bytes: int, repeats: int, path: str, pipe: Connection) -> None:
    """In a process: the same number of bytes, as often, whenever the other end asks."""
    data = memoryview(bytearray(b"x") * num_bytes)
    slots = SharedSlots(_FRAME, _SLOTS * _FRAME)
    slots.accepted()
    shared = [slots.take() for _ in range(_SLOTS)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send((server.getsockname(), slots.offer()))
        sock, _ = server.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(repeats + 1):
                sock.recv(1)
                for number, begin in enumerate(range(0, num_bytes, _FRAME)):
                    part = data[begin : begin + _FRAME]
                    if path == "sent":
                        sock.sendall(part)
                        continue
                    if number >= _SLOTS:
                        sock.recv(1)  # a slot was read
                    slot = shared[number % _SLOTS]
                    assert slot is not None
                    memoryview(slot[1].numpy())[: len(part)] = part
                    sock.sendall(b"x")
                for _ in range(min(_SLOTS, -(-num_bytes // _FRAME)) if path == "shared" else 0):
                    sock.recv(1)


def receive_plainly(num_bytes: int, where: tuple[tuple[str, int], bytes], repeats: int, path: str) -> list[float]:
    address, offer = where
    rates, view = [], memoryview(bytearray(b"x") * num_bytes)
    frames = _OPENED(SharedFrames, offer)
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(repeats + 1):
            at, begin = 0, time.monotonic()
            sock.sendall(b"x")
            while at < num_bytes:
                part = view[at : at + _FRAME]
                if path == "sent":
                    at += sock.recv_into(part)
                    continue
                sock.recv(1)
                part[:] = frames.frame(at // _FRAME % _SLOTS, len(part))
                sock.sendall(b"x")
                at += len(part)
            rates.append(num_bytes / (time.monotonic() - begin))
    return rates[1:]


if __name__ == "__main__":
    main()

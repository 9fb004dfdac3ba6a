"""Two engines that share no object but a TCP connection give the tokens of one; each may lose the other."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from armillary.engine.disaggregation import prefill_rank, wire
from armillary.engine.disaggregation.prefill_rank import PrefillRank
from armillary.engine.disaggregation.prefill_side import PrefillSide
from armillary.engine.disaggregation.roles import connect
from armillary.engine.disaggregation.shared_memory import SharedFrames, SharedSlots
from armillary.engine.disaggregation.wire import Frame, FrameType, PeerGone, Prompt, Welcome
from armillary.engine.engine_thread import EngineThread
from armillary.engine.llm import LLM
from armillary.engine.output.output_text import OutputDelta
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.scheduler import invariants
from armillary.errors import BadInput, BadRecipe
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import load_model, save_model
from armillary.model.weights.mtp_weights import save_draft_head
from armillary.parallel.world import World
from armillary.spec.hf.config import from_hf
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve
from tests.engine.runner.test_draft_head import force, head_of, noted_drafts, one_by_one
from tests.model.layers.test_attention_forms import latent

SERVE = Serve(
    block_tokens=4,
    kv_bytes=400_000,
    max_running=8,
    max_model_len=128,
    max_tokens_per_step=24,  # prompts of several chunks
    check_every=1,
    dtype="fp32",
    prefill_min_tokens=4,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = [[(7 * i * i + 3 * i + seed) % 90 for i in range(length)] for seed, length in enumerate((90, 61, 9, 3, 72))]
PROMPTS.append(PROMPTS[0][:50] + PROMPTS[1][:20])  # continues what another began


class Side:
    """An engine in its thread, with its part in disaggregation."""

    def __init__(self, folder: Path, serve: Serve, world: World | None = None) -> None:
        """On the first rank of a `world`."""
        self.llm = LLM(folder, serve, device="cpu", world=world)
        self.engine = self.llm.engine
        self.worker = EngineThread(self.engine).start()
        group = None if self.llm.ranks is None else self.llm.ranks.world
        self.part = connect(self.engine, self.worker, serve, folder, group)

    def close(self) -> None:
        self.part.close()
        self.worker.stop()
        self.llm.close()

    def gauge(self, name: str) -> float:
        assert self.engine.transfer is not None
        return self.engine.transfer.gauges()[name]

    def tokens(self, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        left = threading.Semaphore(0)

        def deliver(at: int, delta: OutputDelta) -> None:
            found[at] += delta.tokens
            if delta.finish is not None:
                left.release()

        for at, prompt in enumerate(prompts):
            request = Request(id=f"{time.monotonic_ns()}-{at}", prompt=prompt, params=params)
            self.worker.submit(request, lambda delta, at=at: deliver(at, delta))
        assert all(left.acquire(timeout=30) for _ in prompts), "a request never ended"
        return found

    def checked(self) -> None:
        """Nothing is left in the scheduler."""
        until(lambda: not self.engine.busy)
        done = threading.Event()
        wrong: list[BaseException] = []

        def check() -> None:
            try:
                invariants.check_idle(self.engine.scheduler)
            except invariants.Broken as error:
                wrong.append(error)
            done.set()

        self.worker.between_steps(check)
        assert done.wait(10) and not wrong, wrong


def until(what: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def free_address(ranks: int = 1) -> str:
    """The first of as many free ports in a row."""
    while True:
        with ExitStack() as stack, suppress(OSError, OverflowError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for rank in range(1, ranks):
                stack.enter_context(socket.create_server(("127.0.0.1", first + rank)))
            return f"127.0.0.1:{first}"


@contextmanager
def side(folder: Path, role: str, address: str, **settings: object) -> Iterator[Side]:
    made = Side(folder, replace(SERVE, role=role, prefill=address, **settings))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


@contextmanager
def pair(folder: Path, **settings: object) -> Iterator[tuple[Side, Side]]:
    address = free_address()
    with side(folder, "prefill", address) as prefill, side(folder, "decode", address, **settings) as decode:
        until(lambda: decode.gauge("prefill_connected") == 1)
        yield prefill, decode


_SHAPE = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS: dict[str, ModelConfig] = {
    "dense": from_hf(_SHAPE | {"model_type": "llama"}, name="dense"),
    "experts": from_hf(
        _SHAPE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, name="experts"
    ),
    "windows": from_hf(_SHAPE | {"model_type": "qwen3"} | _WINDOWS, name="windows"),
    "latents": latent(vocab=96, context=128),
    "four KV heads": from_hf(_SHAPE | {"model_type": "llama", "num_key_value_heads": 4}, name="four"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("models")
    return {
        name: save_model(build(config, dtype=torch.float32, device="cpu", seed=3), path / name)
        for name, config in MODELS.items()
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What the combined engine says to `PROMPTS`."""
    return {
        name: [made.tokens for made in LLM(folder, SERVE, device="cpu").generate(PROMPTS, GREEDY)]
        for name, folder in folders.items()
    }


Expected = dict[str, list[list[int]]]
Folders = dict[str, Path]


class Taken:
    """Slots of shared memory that blocks were written into."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, take = 0, SharedSlots.take

        def counted(slots: SharedSlots) -> tuple[int, torch.Tensor] | None:
            slot = take(slots)
            self.count += slot is not None
            return slot

        monkeypatch.setattr(SharedSlots, "take", counted)


@pytest.fixture(params=["shared", "sent"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Taken | None:
    """None: blocks go over the connection, as between two hosts."""
    if request.param == "sent":
        monkeypatch.setattr(SharedFrames, "opened", classmethod(lambda cls, offer: None))
        return None
    return Taken(monkeypatch)


@pytest.mark.parametrize("name", MODELS)
def test_two_engines_give_the_tokens_of_one(
    name: str, taken: Taken | None, folders: Folders, expected: Expected
) -> None:
    with pair(folders[name]) as (prefill, decode):
        assert decode.tokens(PROMPTS) == expected[name]
        assert decode.gauge("kv_fetched_total") >= 4 and not decode.gauge("kv_fetch_failed_total")
        received = decode.gauge("kv_received_bytes_total")
        assert received == prefill.gauge("kv_sent_bytes_total") > 0
        assert decode.engine.scheduler.totals.hits > 200  # tokens that it did not compute
        assert decode.tokens(PROMPTS) == expected[name]  # from its own cache
        if name != "windows":  # which are sent again
            assert decode.gauge("kv_received_bytes_total") == received
        assert taken is None or taken.count >= 4
        prefill.checked()
        decode.checked()


def test_the_decode_side_drafts_with_a_model(folders: Folders, expected: Expected) -> None:
    """Which computes prompts from their beginning. It is the model itself, so that every draft token is right."""
    folder = folders["dense"]
    with pair(folder, draft=str(folder)) as (prefill, decode):
        force(decode.engine)
        assert decode.tokens(PROMPTS) == expected["dense"]
        assert decode.gauge("kv_fetched_total") >= 4
        totals = decode.engine.scheduler.totals
        assert totals.drafted > 20 and totals.accepted >= 0.9 * totals.drafted  # but those beyond the end
        decode.checked()
        prefill.checked()


def test_hidden_states_for_a_draft_head_come_with_the_blocks(
    folders: Folders, expected: Expected, tmp_path: Path
) -> None:
    folder, target = tmp_path / "model", load_model(folders["dense"], dtype="fp32")
    shutil.copytree(folders["dense"], folder)
    head = head_of(target)
    save_draft_head(head, target.config, folder, {"steps": 1})
    address = free_address()
    roles = [replace(SERVE, role=role, prefill=address, speculate="mtp") for role in ("prefill", "decode")]
    with ExitStack() as stack:
        prefill, decode = (stack.enter_context(closing(Side(folder, serve))) for serve in roles)
        until(lambda: decode.gauge("prefill_connected") == 1)
        force(decode.engine)
        drafts = noted_drafts(decode.engine)
        assert decode.tokens(PROMPTS) == expected["dense"]
        assert decode.gauge("kv_fetched_total") >= 4 and not decode.gauge("kv_fetch_failed_total")
        assert decode.gauge("kv_received_bytes_total") == prefill.gauge("kv_sent_bytes_total")
        assert len(drafts) > 10 and max(len(tokens) for tokens, _ in drafts) > 80
        for tokens, made in drafts:
            assert made == one_by_one(target, head, tokens, len(made))
        with pytest.raises(BadInput, match="or drafts with another head"):
            Side(folder, replace(SERVE, role="decode", prefill=address))


def test_blocks_are_sent_after_every_chunk(folders: Folders) -> None:
    with side(folders["dense"], "prefill", free_address()) as prefill:
        assert isinstance(prefill.part, PrefillSide)
        with socket.create_connection(prefill.part.address, timeout=10) as sock:
            wire.send(sock, wire.hello(prefill.part.fingerprint))
            assert wire.receive(sock).kind is FrameType.HELLO
            wire.send(sock, Prompt(2, "", PROMPTS[0]).frame(7))
            frames = []
            while (frame := wire.receive(sock, lambda size: memoryview(bytearray(size)))).kind is not FrameType.DONE:
                frames.append(frame)
        assert not frame.head and {sent.number for sent in frames} == {7}
        chunks = [[index for _, index in wire.read_entries(sent.entries, sent.head)] for sent in frames if sent.entries]
        assert len(chunks) >= 4 and list(chain.from_iterable(chunks)) == list(range(2, 22))  # 88 tokens, 24 per step
        prefill.checked()


def test_with_no_more_shared_memory_blocks_go_over_the_connection(
    folders: Folders, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillRank, "_slots", lambda rank, block_bytes, window_bytes: SharedSlots(4096, 4096))
    monkeypatch.setattr(prefill_rank, "_FRAME_BYTES", 1)
    monkeypatch.setattr(SharedSlots, "give_back", lambda slots, number: None)
    taken = Taken(monkeypatch)
    with pair(folders["dense"]) as (_, decode):
        assert decode.tokens(PROMPTS) == expected["dense"]
        assert taken.count == 1 and decode.gauge("kv_fetched_total") >= 4


def test_shared_memory_that_is_not_what_it_says(tmp_path: Path) -> None:
    slots = SharedSlots(1000, 10_000)
    pid, number, inode, size = slots.offer().split()
    wrong = [b"", b"1 2 3", b"1 -2 3 4096", b" ".join((pid, number, b"1" + inode, size))]
    with (tmp_path / "file").open("w+b") as file:
        wrong.append(f"{os.getpid()} {file.fileno()} {os.fstat(file.fileno()).st_ino} 4096".encode())
        assert [SharedFrames.opened(each) for each in wrong] == [None] * len(wrong)
    frames = SharedFrames.opened(slots.offer())
    assert frames is not None and slots.take() is None
    slots.accepted()
    slot = slots.take()
    assert slot is not None
    slot[1][:3] = torch.tensor([1, 2, 3])
    assert bytes(frames.frame(slot[0], 3)) == b"\1\2\3"
    for place in ((slot[0] + 1, 3), (slot[0], 4097)):
        with pytest.raises(PeerGone, match="memory that is not there"):
            frames.frame(*place)
    frames.close()
    slots.close()
    assert slots.take() is None


def test_a_decode_side_that_frees_what_it_does_not_have_is_gone(folders: Folders) -> None:
    with side(folders["dense"], "prefill", free_address()) as prefill:
        assert isinstance(prefill.part, PrefillSide)
        with socket.create_connection(prefill.part.address, timeout=10) as sock:
            wire.send(sock, wire.hello(prefill.part.fingerprint))
            assert SharedFrames.opened(Welcome.read(wire.receive(sock)).offer) is not None
            wire.send(sock, Frame(FrameType.SHARE))
            wire.send(sock, Frame(FrameType.FREE, 3))
            with pytest.raises(PeerGone):
                wire.receive(sock)
        prefill.checked()


def test_a_small_cache_on_the_decode_side_with_blocks_in_host_memory(folders: Folders, expected: Expected) -> None:
    """Prompts wait for space, blocks are evicted to the host and copied from there before they are overwritten."""
    with pair(folders["dense"], kv_bytes=75_000, kv_host_bytes=160_000) as (_, decode):
        assert decode.engine.scheduler.cache.num_blocks < 40
        for _ in range(3):
            assert decode.tokens(PROMPTS) == expected["dense"]
        offload = decode.engine.scheduler.cache.offload
        assert offload is not None and offload.num_offloaded and offload.num_loaded
        assert decode.gauge("kv_fetched_total") >= 4
        decode.checked()


def test_a_prefill_side_that_is_gone_costs_time_and_no_request(folders: Folders, expected: Expected) -> None:
    address = free_address()
    with side(folders["dense"], "decode", address) as decode:
        assert decode.tokens(PROMPTS) == expected["dense"]  # nobody listens
        assert not decode.gauge("prefill_connected")
        with side(folders["dense"], "prefill", address):
            until(lambda: decode.gauge("prefill_connected") == 1)
        until(lambda: decode.gauge("prefill_connected") == 0)
        assert decode.tokens(PROMPTS) == expected["dense"]
        decode.checked()


def accept(listener: socket.socket) -> tuple[socket.socket, int]:
    """A prefill server that agrees to everything, up to its first request: (connection, the request's number)."""
    sock, _ = listener.accept()
    wire.receive(sock)
    wire.send(sock, Welcome(bytes(16), 1, 1, b"").frame())
    return sock, wire.receive(sock).number


def die(sock: socket.socket, number: int) -> None:
    sock.close()


def fall_silent(sock: socket.socket, number: int) -> None:
    time.sleep(1.0)


def send_garbage(sock: socket.socket, number: int) -> None:
    sock.sendall(bytes(range(256)))


def send_blocks_of_another_size(sock: socket.socket, number: int) -> None:
    wire.send(sock, Frame(FrameType.BLOCKS, number, 1, wire.entries_head([(0, 0)]), memoryview(b"12345")))


def give_up(sock: socket.socket, number: int) -> None:
    wire.send(sock, Frame(FrameType.DONE, number, head=b"its blocks were evicted"))
    while wire.receive(sock).kind is FrameType.REQUEST:
        pass


@pytest.mark.parametrize("fault", [die, fall_silent, send_garbage, send_blocks_of_another_size, give_up])
def test_a_prefill_side_that_fails_in_the_middle(
    fault: Callable[[socket.socket, int], None],
    folders: Folders,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "SILENCE_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, number = accept(listener)
            with sock, suppress(PeerGone):
                fault(sock, number)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        with side(folders["dense"], "decode", f"127.0.0.1:{listener.getsockname()[1]}") as decode:
            until(lambda: decode.gauge("prefill_connected") == 1)
            assert decode.tokens(PROMPTS[:1]) == expected["dense"][:1]
            assert decode.gauge("kv_fetch_failed_total") == 1
            decode.checked()
        server.join(10)
        assert not server.is_alive()


def test_an_aborted_request_that_waits_for_blocks(folders: Folders) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection: list[tuple[socket.socket, int]] = []
        threading.Thread(target=lambda: connection.append(accept(listener)), daemon=True).start()
        with side(folders["dense"], "decode", f"127.0.0.1:{listener.getsockname()[1]}") as decode:
            until(lambda: decode.gauge("prefill_connected") == 1)
            said: list[OutputDelta] = []
            decode.worker.submit(Request(id="a", prompt=PROMPTS[0], params=GREEDY), said.append)
            until(lambda: bool(connection))
            decode.worker.abort("a")
            until(lambda: bool(said))
            assert [delta.finish for delta in said] == ["abort"]
            sock, number = connection[0]
            with sock:
                cancel = wire.receive(sock)
            assert (cancel.kind, cancel.number) == (FrameType.CANCEL, number)
            decode.checked()


def test_a_decode_side_that_reads_nothing_stops_its_prompts_and_its_end_frees_them(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    with side(folders["dense"], "prefill", free_address(), prefill_ahead_bytes=1) as prefill:
        assert isinstance(prefill.part, PrefillSide)
        sent = threading.Event()
        monkeypatch.setattr(prefill.part, "_sent", lambda peer, num_bytes, seconds: sent.wait())
        with socket.create_connection(prefill.part.address) as sock:
            wire.send(sock, wire.hello(prefill.part.fingerprint))
            for number, prompt in enumerate(PROMPTS, 1):
                wire.send(sock, Prompt(0, "", prompt).frame(number))
            until(lambda: prefill.engine.scheduler.totals.submitted == 1)
            time.sleep(0.2)
            assert prefill.engine.scheduler.totals.submitted == 1  # the next waits for the reader
        sent.set()
        until(lambda: prefill.gauge("decode_servers") == 0)
        prefill.checked()
        assert prefill.engine.scheduler.totals.submitted < len(PROMPTS)


def test_another_model_is_refused(folders: Folders) -> None:
    address = free_address()
    with side(folders["dense"], "prefill", address):
        with pytest.raises(BadInput, match="serves another model, dtype or block size"):
            Side(folders["experts"], replace(SERVE, role="decode", prefill=address))
        with pytest.raises(BadInput, match="another model, dtype or block size"):
            Side(folders["dense"], replace(SERVE, role="decode", prefill=address, block_tokens=8))
        with pytest.raises(BadInput, match="cannot listen on"):
            Side(folders["dense"], replace(SERVE, role="prefill", prefill=address))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"role": "decode"}, "needs serve.prefill=HOST:PORT"),
        ({"prefill": "a:1"}, "is for serve.role="),
        ({"role": "prefill", "prefill": "a:1", "prefix_cache": False}, "prefix cache"),
        ({"role": "decode", "prefill": "a:1", "pp": 2}, "takes blocks with all layers"),
    ],
)
def test_what_cannot_be_combined(settings: dict[str, object], says: str) -> None:
    with pytest.raises(BadRecipe, match=says):
        Serve(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["9100", "host", ":9100", "host:0", "host:70000"])
def test_addresses(text: str) -> None:
    with pytest.raises(BadRecipe, match="HOST:PORT"):
        wire.parse_address(text)
    assert wire.parse_address("[::1]:9100") == ("::1", 9100)

"""The parts between the socket and the client, each by itself."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import BadInput
from armillary.model.generation_config import SamplingDefaults
from armillary.model.text.tokenizer import Detokenizer, Tokenizer
from armillary.serving.http.problem import Problem
from armillary.serving.http.server import ListenOptions, bind
from armillary.serving.openai.generation import ChoiceText
from armillary.serving.openai.generation_request import generation_request, refuse_priority, timeout_problem
from armillary.serving.openai.logprobs import CompletionLogprobs, chat_entry
from armillary.serving.openai.openapi import document
from armillary.serving.openai.request_body import decode_body
from armillary.serving.openai.schemas import ChatRequest, CompletionRequest, SamplingFields
from armillary.serving.openai.structured_outputs import structure_of
from armillary.serving.openai.tokenization import Tokenization
from armillary.serving.processes.engine_client import for_engine
from armillary.serving.processes.engine_ipc import EngineConfig, SendQueue, StepOutput, Submit
from armillary.serving.processes.rank_processes import Ranks
from armillary.serving.processes.request_mailbox import FinishEvent, Mailbox
from armillary.serving.processes.server_metrics import Histogram, Metrics
from armillary.serving.processes.worker_process import messages, read_message
from armillary.spec.gauges import GAUGES
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home


@pytest.fixture(scope="module")
def texts(folder: Path) -> Tokenization:
    return Tokenization(folder, ())


# --- text


def shown(texts: Tokenization, ids: list[int], *stop: str, **params: Any) -> tuple[str, ChoiceText]:
    made = ChoiceText(texts.detokenizer(), SamplingParams(**params), stop, texts.eos_ids)
    said = "".join(made.push(token) for token in ids if not (made.stopped or made.closed))
    return said + made.finish(), made


def test_characters_come_whole_and_ends_are_not_shown(texts: Tokenization) -> None:
    assert texts.tokenizer is not None
    ids = texts.tokenizer.encode("naïve 漢字 🙂", special=False)
    end = next(iter(texts.eos_ids))
    text, made = shown(texts, [*ids, end])
    assert text == "naïve 漢字 🙂" and made.closed and made.num_tokens == len(ids) + 1
    assert shown(texts, [*ids, end, *ids], min_tokens=len(ids) + 5)[0] == "naïve 漢字 🙂" * 2


def test_a_stop_text_across_tokens_ends_the_text_before_it(texts: Tokenization) -> None:
    assert texts.tokenizer is not None
    ids = texts.tokenizer.encode("one two three", special=False)
    text, made = shown(texts, ids, "o th", "never")
    assert text == "one tw" and made.stopped
    assert shown(texts, ids, "thrice")[0] == "one two three"


def test_tokens_have_their_bytes(texts: Tokenization) -> None:
    assert texts.tokenizer is not None
    for text in ("naïve 漢字 🙂", " def main", "\n\t x"):
        ids = texts.tokenizer.encode(text, special=False)
        assert bytes(byte for token in ids for byte in texts.token_text(token)[1]).decode() == text


def test_special_tokens_are_shown_where_a_parser_needs_them(texts: Tokenization) -> None:
    tokenizer = texts.tokenizer
    assert isinstance(tokenizer, Tokenizer) and tokenizer.eos_id is not None
    name = tokenizer.special_tokens["eos_token"]
    for keep, said in ((frozenset({name}), name), (frozenset[str](), "")):
        made = texts.detokenizer(keep)()
        assert isinstance(made, Detokenizer) and made.push(tokenizer.eos_id) + made.finish() == said


# --- log-probabilities


def test_log_probabilities_have_both_forms(texts: Tokenization) -> None:
    entry = chat_entry((65, float("-inf"), ((66, -0.5),)), texts.token_text)
    assert entry["logprob"] == -9999 and entry["top_logprobs"][0]["logprob"] == -0.5
    lists = CompletionLogprobs(lambda token: ("ab", (97, 98)))
    first, second = lists.part([(1, None, None), (2, -1.0, ((3, -0.1), (4, -0.2)))]), lists.part([(5, -2.0, ())])
    assert first["text_offset"] == [0, 2] and second["text_offset"] == [4]
    assert first["token_logprobs"] == [None, -1.0] and first["top_logprobs"] == [None, {"ab": -0.1}]


# --- generation requests


def test_request_fields_become_sampling_params() -> None:
    text = b'{"n": 2, "top_p": 0, "seed": -3, "stop": "x", "top_k": -1, "logit_bias": {"5": 1}, "timeout_s": 3}'
    body = decode_body(text, SamplingFields)
    request = generation_request(body, max_tokens=7, max_timeout_s=60.0, structure=None)
    params = request.params
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (2, 0.0, 1.0, 0, 7)
    assert request.stop == ("x",) and params.stop == () and params.logit_bias == {5: 1.0} and params.seed is not None
    assert request.timeout_s == 3 and request.own_timeout
    assert generation_request(SamplingFields(), max_tokens=7, max_timeout_s=60.0, structure=None).timeout_s == 60


def test_the_model_says_what_a_request_leaves_out() -> None:
    own = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05)

    def drawn(**given: Any) -> Any:
        return generation_request(
            SamplingFields(**given), max_tokens=7, max_timeout_s=None, structure=None, defaults=own
        ).params

    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert [getattr(drawn(), name) for name in names] == [0.6, 0.95, 20, 0.1, 1.05]
    said: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert [getattr(drawn(**said), name) for name in names] == [0.0, 1.0, 0, 0.0, 1.0]
    assert drawn(top_p=0).temperature == 0 and drawn(top_k=-1).top_k == 0


def test_answers_have_all_the_time_they_need_and_waiting_has_its_limit() -> None:
    serve = for_engine(Serve())
    request = generation_request(SamplingFields(), max_tokens=7, max_timeout_s=serve.timeout_s, structure=None)
    assert request.timeout_s is None and serve.max_wait_s == 600 and Serve().max_wait_s is None
    assert for_engine(Serve(max_wait_s=7)).max_wait_s == 7
    waited = timeout_problem(request, waited_s=600.2)
    assert (waited.status, waited.retry_after_s) == (503, 10) and "waited 600 s" in waited.message
    own = generation_request(
        decode_body(b'{"timeout_s": 3}', SamplingFields), max_tokens=7, max_timeout_s=60.0, structure=None
    )
    assert (
        timeout_problem(own, waited_s=3.1).status == timeout_problem(own).status == 408
        and timeout_problem(own, waited_s=2.0).status == 503
    )


def test_a_priority_that_would_change_nothing_is_refused() -> None:
    refuse_priority(decode_body(b'{"priority": -3}', SamplingFields), Serve())
    refuse_priority(decode_body(b'{"priority": 0}', SamplingFields), Serve(ageing_s=0))
    with pytest.raises(Problem, match=r"serve\.ageing_s=0"):
        refuse_priority(decode_body(b'{"priority": -3}', SamplingFields), Serve(ageing_s=0))


def test_formats_become_structures() -> None:
    def made(text: bytes) -> Any:
        body = decode_body(b'{"messages": [{"role": "user"}], "response_format": %s}' % text, ChatRequest)
        return structure_of(body)

    assert made(b"null") is None and made(b'{"type": "text"}') is None
    assert made(b'{"type": "json_object"}').source == '{"type": "object"}'
    assert made(b'{"type": "choice", "choice": ["a", "b"]}').source == "a\nb"
    with pytest.raises(Problem, match="more than one line"):
        made(b'{"type": "choice", "choice": ["a\\nb"]}')
    with pytest.raises(Problem, match="multipleOf beyond"):
        made(b'{"type": "json_schema", "json_schema": {"schema": {"items": [{"multipleOf": 1e9}]}}}')


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": 1}', b'{"prompt": {"a": 1}}', b"[" * 9999])
def test_bodies_that_cannot_be_read_are_problems(body: bytes) -> None:
    with pytest.raises(Problem) as problem:
        decode_body(body, CompletionRequest)
    assert problem.value.status == 400 and "; " in problem.value.message


# --- mailbox and channel


def test_a_mailbox_gives_what_came_then_what_went_wrong() -> None:
    async def use() -> None:
        box = Mailbox(2, eager=True)
        assert box.token(0, 7, None, 1.0) is None and box.token(0, 8, None, 1.5) == 0.5
        assert [event.token for event in await box.take()] == [7, 8]
        box.token(1, 9, None, 2.0)
        box.fail(Problem(503, "gone; try again"))
        assert [event.token for event in await box.take()] == [9]
        with pytest.raises(Problem, match="gone"):
            await box.take()

    asyncio.run(use())


def test_whole_answers_are_waited_for_once() -> None:
    async def use() -> None:
        box, woken = Mailbox(2, eager=False), []
        task = asyncio.create_task(box.take())
        task.add_done_callback(woken.append)
        for choice in (0, 1):
            await asyncio.sleep(0)
            assert not woken
            box.token(choice, 7, None, 1.0)
            box.end(choice, FinishEvent("stop", "", {}))
        assert len(await task) == 4

    asyncio.run(use())


def test_messages_come_through_whole_even_where_nobody_reads_for_a_while() -> None:
    ours, theirs = socket.socketpair()
    outlet, sent = SendQueue(theirs), [StepOutput(keys=[i] * 3000, tokens=[i] * 3000) for i in range(200)]
    for turn in sent:
        outlet.send(turn)  # the buffer is full long before the end: if this waited, it would wait for ever

    async def receive() -> list[StepOutput]:
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 24)
        found: list[StepOutput] = []
        while len(found) < len(sent):  # what was left over comes without another word
            found.append(await asyncio.wait_for(read_message(reader), 20))
        writer.close()
        return found

    assert asyncio.run(receive()) == sent
    theirs.close()


def test_what_goes_to_an_engine_that_does_not_read_waits_in_its_order(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()

    class Deaf(Ranks):
        def _spawn(self, rank: int, port: int) -> socket.socket:
            return ours

    async def use() -> list[Any]:
        config = EngineConfig(model="m", serve=Serve(), home=Home.at(tmp_path))
        ranks, wanted = (
            Deaf(1, config, print),
            Submit(number=0, prompt=bytes(20_000), params=SamplingParams(), timeout_s=None),
        )
        await ranks.start(config)
        for number in range(200):  # more than the kernel takes
            ranks.send(replace(wanted, number=number))
        found = await asyncio.wait_for(asyncio.to_thread(lambda: list(islice(messages(theirs), 201))), 20)
        ranks.send(wanted)  # there is room again: at once
        found += await asyncio.wait_for(asyncio.to_thread(lambda: list(islice(messages(theirs), 1))), 20)
        await ranks.end()
        return found

    config, *found = asyncio.run(use())
    assert isinstance(config, EngineConfig) and [one.number for one in found] == [*range(200), 0]
    theirs.close()


def test_the_engines_end_reads_until_the_server_is_gone() -> None:
    ours, theirs = socket.socketpair()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(messages(theirs)))
    thread.start()
    SendQueue(ours).send(StepOutput(keys=[1], tokens=[2]))
    ours.sendall(b"\x10\x00\x00\x00half")
    ours.close()
    thread.join(10)
    theirs.close()
    assert found == [StepOutput(keys=[1], tokens=[2])]


def test_a_server_that_leaves_answers_unread_is_gone_too() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"nobody reads this")
    ours.close()  # which resets the socket, as something is in it
    assert list(messages(theirs)) == []
    theirs.close()


# --- metrics, documents, ports


def test_histograms_count_by_bounds() -> None:
    made = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 3.0):
        made.observe(value)
    assert made.buckets() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)] and made.sum == pytest.approx(3.65)


def test_the_metrics_page_has_every_gauge_under_its_name() -> None:
    metrics = Metrics()
    metrics.engine_state = {"preemptions_total": 3.0, "running": 2.0}
    metrics.engine_lost()
    metrics.engine_state = {"preemptions_total": 1.0, "running": 1.0}
    box = Mailbox(1, eager=True, begin=0.0)
    for now in (1.0, 1.5, 2.0):
        box.token(0, 1, None, now)
    metrics.ended(box, 0, {"queue_s": 0.25, "tokens_in": 5}, 2.0, first=True)
    metrics.ended(box, 0, {"queue_s": 0.25, "tokens_in": 5}, 2.0, first=False)  # another answer to the same prompt
    metrics.finished["tool_calls"] += 1
    page = metrics.page().decode()
    for line in (
        "armillary_preemptions_total 4.0",
        "armillary_running 1.0",
        "armillary_ttft_s_sum 2.0",
        "armillary_tpot_s_sum 1.0",
        "armillary_e2e_s_sum 4.0",
        "armillary_queue_s_sum 0.5",
        "armillary_tokens_in_count 1.0",
        'armillary_requests_total{finish="tool_calls"} 1.0',
        "armillary_ready 0.0",
    ):
        assert f"\n{line}\n" in page, line
    ours = {"http_responses", "inflight", "ready", "start_time_seconds", "restarts_total"}
    named = {line.split()[2].removeprefix("armillary_") for line in page.splitlines() if line.startswith("# TYPE")}
    assert {name.removesuffix("_total") for name in named} - {name.removesuffix("_total") for name in ours} <= {
        name.removesuffix("_total") for name in GAUGES
    }


def test_the_document_describes_every_field() -> None:
    made = document()
    schemas = made["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["temperature"]["description"] == "0 is greedy; left out: 1"
    assert schemas["CompletionRequest"]["required"] == ["prompt"] and "/v1/chat/completions" in made["paths"]


def test_the_servers_process_has_no_torch() -> None:
    code = (
        "import sys, armillary.serving.openai.run_server, armillary.serving.openai.app; print('torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert ran.stdout.strip() == "False"


def test_a_port_that_is_taken_is_one_line() -> None:
    with bind(ListenOptions(port=0)) as taken:
        taken.listen()
        with pytest.raises(BadInput, match="try another --port"):
            bind(ListenOptions(port=taken.getsockname()[1]))
    with pytest.raises(BadInput, match="try another --port or --host"):
        bind(ListenOptions(host="203.0.113.7", port=0))

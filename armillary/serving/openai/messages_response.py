"""Response of Anthropic's /v1/messages: a message of blocks, complete or as events."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from msgspec.json import encode

from armillary.serving.openai.response import ResponseWriter
from armillary.serving.openai.schemas import StreamOptions
from armillary.serving.openai.tool_calls import parse_json

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter(ResponseWriter):
    """Writes one message."""

    async def _complete(self) -> None:
        async for deltas in self._generation.deltas():
            for delta in deltas:
                self._formatter.add(delta)
        choice = self._formatter.choices()[0]
        blocks = list(_blocks(choice["message"]))
        await self._connection.json(200, self._message(blocks, choice["finish_reason"]))

    def _message(self, blocks: list[dict[str, Any]], finish: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": blocks,
            "stop_reason": self._stop_reason(blocks, finish) if finish is not None else None,
            "stop_sequence": self._stop_sequence(),
            "usage": self._counts(),
        }

    def _stop_reason(self, blocks: list[dict[str, Any]], finish: str) -> str:
        if any(block["type"] == "tool_use" for block in blocks) and finish == "stop":
            return "tool_use"
        stopped = finish == "stop" and self._generation.texts[0].stopped
        return "stop_sequence" if stopped else _STOP_REASONS.get(finish, "end_turn")

    def _stop_sequence(self) -> str | None:
        """The text that ended the output, where there is only one that can have."""
        stop = self._generation.request.stop
        return stop[0] if self._generation.texts[0].stopped and len(stop) == 1 else None

    def _counts(self) -> dict[str, int]:
        usage, cached = self._generation.usage(), self._generation.cached_tokens
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    async def _stream(self, options: StreamOptions) -> None:
        connection, events, first = self._connection, BlockEvents(), True
        async for deltas in self._generation.deltas():
            data = b""
            if first:
                await connection.begin_events()
                data, first = _event("message_start", message=self._message([], None)), False
            for delta in deltas:
                for choice in self._formatter.add(delta):
                    data += b"".join(events.of(choice["delta"]))
            if data:
                await connection.event(data)
        finish = self._formatter.finish_reason(0)
        end = {"stop_reason": self._stop_reason(events.blocks, finish), "stop_sequence": self._stop_sequence()}
        last = b"".join(events.end()) + _event("message_delta", delta=end, usage=self._counts())
        await connection.end_events(last + _event("message_stop"))


class BlockEvents:
    """Events of the blocks of a message, from the deltas of a chat completion."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._is_open = False

    def of(self, delta: dict[str, Any]) -> Iterator[bytes]:
        if text := delta.get("reasoning_content"):
            yield from self._continue({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta(type="thinking_delta", thinking=text)
        if text := delta.get("content"):
            yield from self._continue({"type": "text", "text": ""})
            yield self._delta(type="text_delta", text=text)
        for call in delta.get("tool_calls") or ():
            yield from self.end()
            function = call["function"]
            yield from self._begin({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            yield self._delta(type="input_json_delta", partial_json=function["arguments"])
            yield from self.end()

    def end(self) -> Iterator[bytes]:
        """Close the block that is open."""
        if self._is_open:
            yield _event("content_block_stop", index=len(self.blocks) - 1)
        self._is_open = False

    def _continue(self, block: dict[str, Any]) -> Iterator[bytes]:
        """Begin a block, unless one of its type is open."""
        if not self._is_open or self.blocks[-1]["type"] != block["type"]:
            yield from self.end()
            yield from self._begin(block)

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        self.blocks.append(block)
        self._is_open = True
        yield _event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def _delta(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=len(self.blocks) - 1, delta=delta)


def _blocks(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    if message.get("content"):
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls") or ():
        arguments = parse_json(call["function"]["arguments"])
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        yield block | {"input": arguments if isinstance(arguments, dict) else {}}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **fields}) + b"\n\n"

"""Response of OpenAI's /v1/responses: output items, complete or as events."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from msgspec.json import encode

from armillary.serving.openai.response import ResponseWriter
from armillary.serving.openai.schemas import StreamOptions

_TEXTS = {"reasoning_content": "reasoning_text", "content": "output_text"}
_LOGPROBS: dict[str, dict[str, Any]] = {"reasoning_text": {}, "output_text": {"logprobs": []}}


class ResponsesWriter(ResponseWriter):
    """Writes one response."""

    async def _complete(self) -> None:
        async for deltas in self._generation.deltas():
            for delta in deltas:
                self._formatter.add(delta)
        choice = self._formatter.choices()[0]
        items = OutputItems()
        for _ in items.of(choice["message"]):
            pass
        for _ in items.end():
            pass
        await self._connection.json(200, self._response(items.items, choice["finish_reason"]))

    def _response(self, items: list[dict[str, Any]], finish: str | None) -> dict[str, Any]:
        """The response object; `finish` is None while it is in progress."""
        cut = finish == "length"
        return {
            "id": f"resp_{str(self._head['id']).rpartition('-')[2]}",
            "object": "response",
            "created_at": self._head["created"],
            "status": "in_progress" if finish is None else "incomplete" if cut else "completed",
            "model": self._head["model"],
            "output": items,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": None,
            "top_p": None,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "store": False,
            "usage": self._counts() if finish is not None else None,
        }

    def _counts(self) -> dict[str, Any]:
        usage = self._generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self._generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    async def _stream(self, options: StreamOptions) -> None:
        connection, items, first, number = self._connection, OutputItems(), True, 0

        def encoded(events: Iterator[dict[str, Any]]) -> bytes:
            nonlocal number
            data = b""
            for event in events:
                data += (
                    f"event: {event['type']}\ndata: ".encode() + encode(event | {"sequence_number": number}) + b"\n\n"
                )
                number += 1
            return data

        async for deltas in self._generation.deltas():
            data = b""
            if first:
                await connection.begin_events()
                begun = self._response([], None)
                kinds = ("response.created", "response.in_progress")
                data, first = encoded({"type": kind, "response": begun} for kind in kinds), False
            for delta in deltas:
                for choice in self._formatter.add(delta):
                    data += encoded(items.of(choice["delta"]))
            if data:
                await connection.event(data)
        last = encoded(items.end())
        response = self._response(items.items, self._formatter.finish_reason(0))
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        await connection.end_events(last + encoded(iter([{"type": kind, "response": response}])))


class OutputItems:
    """Items of a response and their events, from the deltas of a chat completion: reasoning, messages and calls."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._text: dict[str, Any] | None = None  # content of the reasoning or message that is open

    def of(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for name, kind in _TEXTS.items():
            if text := delta.get(name):
                yield from self._continue(kind)
                assert self._text is not None
                self._text["text"] += text
                yield self._place(f"response.{kind}.delta", delta=text, **_LOGPROBS[kind])
        for call in delta.get("tool_calls") or ():
            yield from self.end()
            yield from self._call(call)

    def _continue(self, kind: str) -> Iterator[dict[str, Any]]:
        """Begin an item for text of this kind, unless one is open."""
        if self._text is not None and self._text["type"] == kind:
            return
        yield from self.end()
        self._text = {"type": kind, "text": ""} | ({"annotations": []} if kind == "output_text" else {})
        item: dict[str, Any] = (
            {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant"}
            if kind == "output_text"
            else {"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": []}
        )
        self.items.append(item | {"status": "in_progress", "content": []})
        yield self._item("response.output_item.added")
        self.items[-1]["content"] = [self._text]
        yield self._place("response.content_part.added", part={**self._text})

    def end(self) -> Iterator[dict[str, Any]]:
        """Close the reasoning or message that is open."""
        if self._text is None:
            return
        self.items[-1]["status"], kind = "completed", self._text["type"]
        yield self._place(f"response.{kind}.done", text=self._text["text"], **_LOGPROBS[kind])
        yield self._place("response.content_part.done", part={**self._text})
        yield self._item("response.output_item.done")
        self._text = None

    def _call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        function = call["function"]
        item = {
            "id": f"fc_{uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": "",
        }
        self.items.append(item)
        where = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield self._item("response.output_item.added")
        item |= {"arguments": function["arguments"], "status": "completed"}
        yield {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield {"type": "response.function_call_arguments.done", **where, **done}
        yield self._item("response.output_item.done")

    def _item(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.items) - 1, "item": {**self.items[-1]}}

    def _place(self, kind: str, **fields: Any) -> dict[str, Any]:
        where = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return {"type": kind, **where, **fields}

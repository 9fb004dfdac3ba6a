"""The upstream of benchmarks/gateway.py: answers at once, or streams a chunk every so many seconds.

    python benchmarks/gateway_upstream.py PORT

The request's `user` is the time between chunks. Every chunk has the time at which it was due, by the clock that all
processes of a machine share, so that the load generator sees how late it arrives.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from armillary.serving.http.connections import raise_file_limit

ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 0,
    "model": "bot",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13},
}
_DATA = json.dumps(ANSWER).encode()
_WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_DATA) + _DATA
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHOICE = {"index": 0, "delta": {"content": "tok DUE"}, "finish_reason": None}
_EVENT = (
    b"data: " + json.dumps(ANSWER | {"object": "chat.completion.chunk", "usage": None, "choices": [_CHOICE]}).encode()
)
_LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Upstream(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.data = transport, b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.data) < end + 4 + size:
                return
            body, self.data = self.data[end + 4 : end + 4 + size], self.data[end + 4 + size :]
            self.answer(body)

    def answer(self, body: bytes) -> None:
        if b'"stream":true' not in body.replace(b" ", b""):
            self.transport.write(_WHOLE)
            return
        asked = json.loads(body)
        self.transport.write(_HEAD)
        self.chunk(asked["max_tokens"], float(asked["user"]), time.monotonic())

    def chunk(self, left: int, gap_s: float, due_at: float) -> None:
        """Send one chunk, and the others in their time."""
        if self.transport.is_closing():
            return
        if left == 0:
            self.transport.write(_LAST)
            return
        event = _EVENT.replace(b"DUE", b"%.6f" % due_at) + b"\n\n"
        self.transport.write(b"%x\r\n%s\r\n" % (len(event), event))
        next_at = due_at + gap_s
        asyncio.get_running_loop().call_later(
            max(0.0, next_at - time.monotonic()), self.chunk, left - 1, gap_s, next_at
        )


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    raise_file_limit()
    uvloop.run(serve(int(sys.argv[1])))

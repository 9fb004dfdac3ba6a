"""A server process without a model: each request takes SECONDS, SLOTS at a time. For tests of what starts and stops it.

python sleeping_server.py PORT SECONDS SLOTS [HOST]     or SECONDS SLOTS --host HOST --port PORT
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ARGS = sys.argv[1:]
if "--port" in ARGS:
    ARGS = [ARGS[ARGS.index("--port") + 1], *ARGS[:2], ARGS[ARGS.index("--host") + 1]]
PORT, SECONDS, SLOTS = int(ARGS[0]), float(ARGS[1]), int(ARGS[2])
slots, waiting, lock = threading.Semaphore(SLOTS), [0], threading.Lock()
hung, trickles = threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if hung.is_set():
            time.sleep(60)
        if self.path == "/metrics":
            return self.answer(f"armillary_waiting {waiting[0]}\narmillary_kv_used_fraction 0.1\n".encode())
        self.answer(b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked["prompt"] == "hang":
            hung.set()
            time.sleep(60)
        if asked["prompt"] == "trickle":
            trickles.set()
        if SECONDS < 0:
            return self.answer(b"{}", 500)
        if asked.get("stream"):
            return self.stream(int(asked["max_tokens"]))
        with lock:
            waiting[0] += 1
        with slots:
            with lock:
                waiting[0] -= 1
            time.sleep(SECONDS)
        self.answer(json.dumps({"object": "text_completion", "choices": [{"text": str(PORT)}]}).encode())

    def stream(self, tokens: int) -> None:
        """A token every SECONDS; every 1.5 s once a prompt has said so."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for text in [b'data: {"choices":[{"index":0,"text":"tok"}]}\n\n'] * tokens + [b"data: [DONE]\n\n", b""]:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
            time.sleep(1.5 if trickles.is_set() else SECONDS)

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 64
    daemon_threads = True


Server((ARGS[3] if len(ARGS) > 3 else "127.0.0.1", PORT), Handler).serve_forever()

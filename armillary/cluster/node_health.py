"""What probes ask a node: whether the process that watches the ranks answers, and whether all its ranks run.

`python -m armillary.cluster.node_health URL …` is the health check of a container: whether one of the URLs answers,
where the container's command is one that listens.
"""

from __future__ import annotations

import sys
import threading
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import psutil

LIVE, READY = "/livez", "/readyz"
_TIMEOUT_S = 5.0


def serve_health(port: int, ranks: int) -> ThreadingHTTPServer:
    """Answer on all addresses, in a thread that ends with the process."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(self.path, ranks)
            body = f"{text}\n".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:
            """A probe every few seconds does not belong into the job's log."""

    server = ThreadingHTTPServer(("", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server


def answer(path: str, ranks: int) -> tuple[int, str]:
    """Status and text of a probe's answer."""
    if path == LIVE:
        return 200, "live"
    if path != READY:
        return 404, f"try {LIVE} or {READY}"
    running = count_ranks()
    return (200 if running >= ranks else 503), f"{running} of {ranks} ranks run"


def count_ranks() -> int:
    """Children of this process that run armillary: torchrun starts no others of that kind."""
    count = 0
    for child in psutil.Process().children():
        try:
            count += child.status() != psutil.STATUS_ZOMBIE and "armillary" in child.cmdline()
        except psutil.Error:  # it ended meanwhile
            continue
    return count


def listens(command: Sequence[str]) -> bool:
    """Whether a container with this command answers: a server, and a node that is told a port for probes."""
    words = " ".join(command).split()  # also those of sh -c '…'
    serves = any(Path(word).name == "armillary" and then == "serve" for word, then in pairwise(words))
    return serves or "--health-port" in words


def main(urls: Sequence[str], command: Sequence[str]) -> int:
    """0 where one of them answers that all is well, or the command never does."""
    if not listens(command):
        print("nothing listens here, and nothing should")
        return 0
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S):
                return 0
        except OSError as error:  # also what the server refuses
            print(f"{url}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], psutil.Process(1).cmdline()))

"""Runs the probes of a rendered pod against a real process, as the kubelet does: startup first, then liveness and
readiness side by side, each with its own period, timeout and threshold.

https://kubernetes.io/docs/concepts/configuration/liveness-readiness-startup-probes/ (read 2026-11): a status from 200
to 399 passes; `failureThreshold` failures in a row fail the probe; a pod starts not ready, and one pass makes it ready.
"""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class Probe:
    """One of a container's probes."""

    name: str
    path: str
    port: int
    period_s: float
    timeout_s: float
    threshold: int
    failures: int = 0
    statuses: list[int] = field(default_factory=list)  # 0: no answer

    def run(self) -> bool:
        self.statuses.append(self._status())
        passed = 200 <= self.statuses[-1] < 400
        self.failures = 0 if passed else self.failures + 1
        return passed

    def _status(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout_s)
        try:
            connection.request("GET", self.path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


class Kubelet:
    """The probes of one container while it runs. `events` are what the kubelet would do, with the time since the start:
    started, ready, not ready, kill."""

    def __init__(self, container: dict[str, Any], ports: dict[str, int], *, speed: float = 1.0) -> None:
        """`ports`: where a named port is really; `speed`: periods are so many times shorter, so that failures add up
        faster than the manifest says: stricter with a slow server, and quicker to find a dead one."""
        self._probes = {
            name: Probe(
                name=name,
                path=spec["httpGet"]["path"],
                port=ports[spec["httpGet"]["port"]],
                period_s=spec.get("periodSeconds", 10) / speed,
                timeout_s=spec.get("timeoutSeconds", 1),
                threshold=spec.get("failureThreshold", 3),
            )
            for name, spec in ((name, container[f"{name}Probe"]) for name in ("startup", "liveness", "readiness"))
        }
        self._begin, self._over = time.monotonic(), threading.Event()
        self.events: list[tuple[float, str]] = []
        self.ready = False
        self._threads = [threading.Thread(target=self._startup, daemon=True)]

    def __getitem__(self, name: str) -> Probe:
        return self._probes[name]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)

    @property
    def names(self) -> list[str]:
        return [name for _, name in self.events]

    def wait_for(self, event: str, seconds: float) -> float:
        """Until an event has come; its time."""
        end = time.monotonic() + seconds
        while event not in self.names:
            assert time.monotonic() < end, f"no {event} within {seconds:g} s: {self.events}"
            time.sleep(0.05)
        return next(at for at, name in self.events if name == event)

    def _note(self, event: str) -> None:
        self.events.append((time.monotonic() - self._begin, event))

    def _startup(self) -> None:
        probe = self["startup"]
        while not self._over.is_set():
            if probe.run():
                self._note("started")
                for name in (self._liveness, self._readiness):
                    self._threads.append(threading.Thread(target=name, daemon=True))
                    self._threads[-1].start()
                return
            if probe.failures >= probe.threshold:
                return self._note("kill")
            self._over.wait(probe.period_s)

    def _liveness(self) -> None:
        probe = self["liveness"]
        while not self._over.is_set():
            probe.run()
            if probe.failures >= probe.threshold:
                return self._note("kill")
            self._over.wait(probe.period_s)

    def _readiness(self) -> None:
        probe = self["readiness"]
        while not self._over.is_set():
            if probe.run() and not self.ready:
                self.ready = True
                self._note("ready")
            elif probe.failures >= probe.threshold and self.ready:
                self.ready = False
                self._note("not ready")
            self._over.wait(probe.period_s)

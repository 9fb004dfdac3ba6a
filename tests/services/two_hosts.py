"""Two hosts on one machine: network namespaces with their own addresses, a link between them that `tc` throttles, and
an ssh daemon in each. They share the file system; each has an id of its own where a machine has its boot id."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("ip", "tc", "sshd", "ssh", "ssh-keygen")
ADDRESSES = ("10.87.0.1", "10.87.0.2")
SSHD = """
Port 22
PidFile none
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
SetEnv {environment}
"""


@dataclass(frozen=True)
class Hosts:
    """`names` are the namespaces; `ssh_options` let ssh in from the first of them."""

    names: tuple[str, str]
    addresses: tuple[str, str]
    ssh_options: tuple[str, ...]

    def run(self, host: int, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        """Run a program on a host."""
        done: subprocess.CompletedProcess[str]
        done = subprocess.run(self.inside(host, command), text=True, capture_output=True, **options)  # type: ignore[call-overload]
        return done

    def inside(self, host: int, command: list[str]) -> list[str]:
        """One core each, as two machines would have cores of their own."""
        core = host % (os.cpu_count() or 1)
        return ["ip", "netns", "exec", self.names[host], "taskset", "-c", str(core), *command]

    def throttle(self, rate: str) -> None:
        """Both directions of the link, to a rate like 400mbit."""
        for number, name in enumerate(self.names):
            shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
            _sh("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", f"link{number}", *shape)


def why_not() -> str:
    """Why two hosts cannot be made here; empty where they can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]
    if missing:
        return f"{', '.join(missing)} missing; apt install iproute2 openssh-server"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return ""


@contextmanager
def two_hosts(folder: Path, environment: dict[str, str]) -> Iterator[Hosts]:
    """`environment` is what commands over ssh find."""
    folder.mkdir(parents=True, exist_ok=True)
    names = tuple(f"armillary-{os.getpid()}-{number}" for number in range(2))
    for file in ("host_key", "key"):
        _sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / file))
    with ExitStack() as stack:
        for name in names:
            _sh("ip", "netns", "add", name)
            stack.callback(_sh, "ip", "netns", "del", name)
            stack.callback(shutil.rmtree, _name_files(name))
        _sh("ip", "link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link1", "netns", names[1])
        for number, name in enumerate(names):
            inside = ("ip", "-n", name)
            _sh(*inside, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"link{number}")
            _sh(*inside, "link", "set", f"link{number}", "up")
            _sh(*inside, "link", "set", "lo", "up")
        options = ("-i", str(folder / "key"), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
        hosts = Hosts((names[0], names[1]), ADDRESSES, (*options, "-o", "LogLevel=ERROR"))
        for number in range(2):
            stack.enter_context(_sshd(folder, hosts, number, environment))
        yield hosts


def _name_files(name: str) -> Path:
    """Files that `ip netns exec` puts over those in /etc: no name server is asked, which nobody would answer."""
    folder = Path("/etc/netns", name)
    folder.mkdir(parents=True)
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    lines = [f"{address} host-{number}" for number, address in enumerate(ADDRESSES)]
    (folder / "hosts").write_text("\n".join(("127.0.0.1 localhost", *lines)) + "\n")
    return folder


@contextmanager
def _sshd(folder: Path, hosts: Hosts, number: int, environment: dict[str, str]) -> Iterator[None]:
    Path("/run/sshd").mkdir(exist_ok=True)
    values = environment | {"ARMILLARY_NODE_ID": f"host-{number}"}
    config = folder / f"sshd-{number}.conf"
    config.write_text(SSHD.format(folder=folder, environment=" ".join(f'{k}="{v}"' for k, v in values.items())))
    command = hosts.inside(number, ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)])
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while hosts.run(1 - number, ["ssh", *hosts.ssh_options, hosts.addresses[number], "true"]).returncode:
            assert time.monotonic() < end and daemon.poll() is None, "sshd does not listen"
            time.sleep(0.2)
        yield
    finally:
        daemon.terminate()
        daemon.wait(30)


def _sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)

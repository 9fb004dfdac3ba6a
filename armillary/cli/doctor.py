"""`armillary doctor`: what this machine has, what will and will not work, and how to get the rest."""

from armillary.cli.output import Output
from armillary.cli.verb import verb
from armillary.machine.doctor import Check
from armillary.machine.doctor import doctor as examine
from armillary.machine.machine import Machine, machine
from armillary.machine.numa import NumaNode
from armillary.store.home import Home
from armillary.units import bytes_text, scaled

_MARK = {"ok": "✓", "warn": "!", "missing": "✗"}


@verb
def doctor(out: Output, home: Home) -> None:
    """Look at this machine: devices, software, room; say what will work and how to get the rest."""
    found = machine()
    out.fields("this machine", _machine_pairs(found))
    checks = examine(home.work, found)
    out.say()
    out.table("", ["", "check", "found"], [[_MARK[check.state], check.name, check.finding] for check in checks])
    _advise(out, checks)
    plain = [{"name": c.name, "state": c.state, "found": c.finding, "means": c.means, "fix": c.fix} for c in checks]
    out.result({"machine": found, "checks": plain}, quiet=[f"{c.state} {c.name}: {c.finding}" for c in checks])


def _machine_pairs(machine: Machine) -> list[tuple[str, object]]:
    cpu = machine.cpu
    disks = [f"{disk.path} {bytes_text(disk.free_bytes)} free ({disk.kind})" for disk in machine.disks]
    network = [f"{card.name} {_speed(card.bits_per_s)}" for card in machine.network]
    gpus = [f"{gpu.name} {bytes_text(gpu.memory_bytes or 0)}" for gpu in machine.gpus]
    links = sorted(set(machine.gpu_links.values()))
    pairs: list[tuple[str, object]] = [
        ("system", machine.system),
        ("CPU", f"{cpu.model}, {cpu.cores} cores, {cpu.usable} usable{_because(cpu.why)}"),
        ("extensions", " ".join(cpu.isa)),
        ("memory", bytes_text(machine.memory_bytes) + _because(machine.memory_why)),
        ("NUMA nodes", [_node_text(node) for node in machine.numa if len(machine.numa) > 1]),
        ("accelerators", gpus),
        ("between them", links),
        ("disks", disks),
        ("network", network),
    ]
    return [(name, value) for name, value in pairs if value not in ("", [])]


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _node_text(node: NumaNode) -> str:
    """'1: 32 cores, 128 GB'."""
    barred = "" if node.allowed else ", not for this process"
    return f"{node.index}: {len(node.cores)} cores, {bytes_text(node.memory_bytes)}{barred}"


def _speed(bits_per_s: float | None) -> str:
    return scaled(bits_per_s, "bit/s") if bits_per_s else "speed unknown"


def _advise(out: Output, checks: list[Check]) -> None:
    notes = [check for check in checks if check.means]
    if notes:
        out.say()
        out.table("limits", ["check", "means", "to change it"], [[c.name, c.means, c.fix] for c in notes])

"""`armillary doctor`: what this machine has, what will and will not work, and how to get the rest."""

from armillary.cli.output import Output
from armillary.cli.verb_decorator import verb
from armillary.machine.doctor import doctor as examine
from armillary.machine.machine import Machine, machine
from armillary.machine.numa import NumaNode
from armillary.store.home import Home
from armillary.units import bytes_text, scaled

_MARK = {"ok": "✓", "warn": "!", "missing": "✗"}


@verb
def doctor(out: Output, home: Home) -> None:
    """Inspect this machine: devices, software, disk space; say what will work and how to get the rest."""
    inspected = machine()
    out.fields("this machine", _machine_fields(inspected))
    checks = examine(home.work, inspected)
    out.say()
    out.table("", ["", "check", "found"], [[_MARK[check.state], check.name, check.finding] for check in checks])
    limits = [[check.name, check.means, check.fix] for check in checks if check.means]
    if limits:
        out.say()
        out.table("limits", ["check", "means", "to change it"], limits)
    plain = [{"name": c.name, "state": c.state, "found": c.finding, "means": c.means, "fix": c.fix} for c in checks]
    out.result({"machine": inspected, "checks": plain}, quiet=[f"{c.state} {c.name}: {c.finding}" for c in checks])


def _machine_fields(machine: Machine) -> list[tuple[str, object]]:
    cpu = machine.cpu
    disks = [f"{disk.path} {bytes_text(disk.free_bytes)} free ({disk.kind})" for disk in machine.disks]
    network = [
        f"{card.name} {scaled(card.bits_per_s, 'bit/s') if card.bits_per_s else 'speed unknown'}"
        for card in machine.network
    ]
    gpus = [f"{gpu.name} {bytes_text(gpu.memory_bytes or 0)}" for gpu in machine.gpus]
    fields: list[tuple[str, object]] = [
        ("system", machine.system),
        ("CPU", f"{cpu.model}, {cpu.cores} cores, {cpu.usable} usable{_because(cpu.why)}"),
        ("extensions", " ".join(cpu.isa)),
        ("memory", bytes_text(machine.memory_bytes) + _because(machine.memory_why)),
        ("NUMA nodes", [_node_text(node) for node in machine.numa if len(machine.numa) > 1]),
        ("accelerators", gpus),
        ("between them", sorted(set(machine.gpu_links.values()))),
        ("disks", disks),
        ("network", network),
    ]
    return [(name, value) for name, value in fields if value not in ("", [])]


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _node_text(node: NumaNode) -> str:
    """'1: 32 cores, 128 GB'."""
    barred = "" if node.allowed else ", not for this process"
    return f"{node.index}: {len(node.cores)} cores, {bytes_text(node.memory_bytes)}{barred}"

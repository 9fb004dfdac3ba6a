"""Which machine a rank is on, and by which interface it reaches the others."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from armillary.errors import BadInput, NotFound
from armillary.machine.network_route import Route, route_to
from armillary.machine.node_id import node_id

SLURM = {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "gpu07"}


def test_the_scheduler_names_a_node_else_the_boot(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("b00t\n")
    assert node_id({**SLURM, "ARMILLARY_NODE_ID": "blue"}, tmp_path) == "blue"
    assert node_id(SLURM, tmp_path) == "gpu07"
    assert node_id({"SLURMD_NODENAME": "gpu07"}, tmp_path) == "b00t", "not inside a job"
    assert node_id({"HOSTNAME": "web"}, tmp_path) == "b00t"
    assert len(node_id({}, tmp_path / "no")) == 12, "a hardware address where the system reports no boot"


def interfaces(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    found = {name: [SimpleNamespace(family=socket.AF_INET, address=each)] for name, each in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


def test_the_first_node_is_met_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, lo="127.0.0.1", eth0="10.0.0.1")
    assert route_to("10.0.0.1", is_host=True) == Route(interface="eth0", address="10.0.0.1")
    assert route_to("127.0.0.1") == Route(interface="lo", address="127.0.0.1")
    assert route_to("localhost", is_host=True).is_loopback


def test_a_host_name_on_loopback_gives_way_to_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, lo="127.0.1.1", eth0="10.0.0.1")
    monkeypatch.setattr("armillary.machine.network_route._resolve", lambda host: "127.0.1.1")
    seen = Route(interface="eth0", address="10.0.0.1")
    monkeypatch.setattr("armillary.machine.network_route._towards", lambda target: seen)
    assert route_to("node1", is_host=True) == seen
    assert route_to("127.0.1.1", is_host=True).is_loopback, "an address is taken at its word"


def test_a_named_interface_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, lo="127.0.0.1", ib0="192.168.5.7")
    assert route_to("nowhere.invalid", interface="ib0") == Route(interface="ib0", address="192.168.5.7")
    with pytest.raises(BadInput, match="there is no network interface ib1 here; it has ib0, lo"):
        route_to("10.0.0.1", interface="ib1")


def test_a_name_without_an_address_is_named() -> None:
    with pytest.raises(NotFound, match=r"nowhere\.invalid has no address here .*; name the host by its address"):
        route_to("nowhere.invalid")

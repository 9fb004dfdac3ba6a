"""What a node does before it becomes torchrun: which node it is, by which network, and with which command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from armillary.cluster.node import NodeStart, environment, is_finished, main, read_arguments, torchrun_arguments
from armillary.errors import BadInput
from armillary.machine.network_route import Route
from armillary.store.home import Home
from armillary.store.runs import create_run

WORDS = (
    "--nodes 2 --ranks 4 --id fox --restarts 3 --stop-s 120 --rendezvous 10.0.0.1:29500 {} -- train r.toml --run fox"
)


def start(more: str = "--node-rank 1", env: dict[str, str] | None = None) -> NodeStart:
    return read_arguments(WORDS.format(more).split(), env or {})


def test_the_command_line_of_torchrun() -> None:
    command = torchrun_arguments(start(), Route(interface="eth1", address="10.0.0.2"))
    assert {
        "--nnodes=2",
        "--nproc-per-node=4",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.0.0.1:29500",
        "--rdzv-conf=is_host=0",
        "--rdzv-id=fox",
        "--local-addr=10.0.0.2",
        "--max-restarts=3",
    } <= set(command[: command.index("-m")])
    assert command[-5:] == ["armillary", "train", "r.toml", "--run", "fox"]
    assert "--rdzv-conf=is_host=1" in torchrun_arguments(
        start("--node-rank 0"), Route(interface="lo", address="127.0.0.1")
    )


def test_a_torch_that_cannot_be_told_how_long_ranks_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "run.py").write_text("")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("armillary.cluster.node.find_spec", lambda name: spec)
    command = torchrun_arguments(start(), Route(interface="eth1", address="10.0.0.2"))
    assert not any("shutdown" in word for word in command)
    assert "not 120 s" in capsys.readouterr().out


def test_torchrun_itself_reads_that_command_line() -> None:
    from torch.distributed.run import parse_args

    read = parse_args(torchrun_arguments(start(), Route(interface="eth1", address="10.0.0.2")))
    assert read.training_script == "armillary" and read.module and read.local_addr == "10.0.0.2"
    assert read.training_script_args == ["train", "r.toml", "--run", "fox"]


@pytest.mark.parametrize(
    ("more", "env", "rank"),
    [
        ("--node-rank 1", {"SLURM_NODEID": "0"}, 1),
        ("", {"SLURM_NODEID": "1"}, 1),
        ("", {"JOB_COMPLETION_INDEX": "0"}, 0),
    ],
)
def test_the_scheduler_numbers_the_nodes(more: str, env: dict[str, str], rank: int) -> None:
    assert start(more, env).node_rank == rank


def test_a_node_without_a_number_is_refused() -> None:
    with pytest.raises(BadInput, match="node rank '' is none of 2 nodes; give --node-rank"):
        start("")
    with pytest.raises(BadInput, match="node rank '2' is none of 2"):
        start("--node-rank 2")


def test_ranks_learn_their_node_and_interface() -> None:
    route = Route(interface="eth1", address="10.0.0.2")
    values = environment(start(), route, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "gpu07", "NCCL_SOCKET_IFNAME": "ib0"})
    assert values["ARMILLARY_NODE_ID"] == "gpu07" and values["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "NCCL_SOCKET_IFNAME" not in values, "what a user has set stays"
    assert environment(start("--node-rank 1 --node-id blue"), route, {})["ARMILLARY_NODE_ID"] == "blue"
    loopback = environment(start(), Route(interface="lo", address="127.0.0.1"), {})
    assert loopback["GLOO_SOCKET_IFNAME"] == "lo" and "NCCL_SOCKET_IFNAME" not in loopback


def test_a_finished_run_is_not_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.toml").write_text('[model]\nname = "gpt2"\n[train]\nsteps = 10\n')
    run = create_run(Home.at(tmp_path), {}, steps=10, name="fox")
    command = ("train", str(tmp_path / "r.toml"), "--run", "fox", "--home", str(tmp_path))
    assert not is_finished(command)
    run.update(state="finished", step=10)
    assert is_finished(command)
    words = ["--nodes", "1", "--ranks", "1", "--id", "fox", "--rendezvous", "127.0.0.1:1", "--"]
    assert main([*words, *command]) == 0
    assert "run fox is finished" in capsys.readouterr().out
    (tmp_path / "r.toml").write_text('[model]\nname = "gpt2"\n[train]\nsteps = 20\n')
    assert not is_finished(command), "more steps were asked for"


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--nodes",
        "1",
        "--ranks",
        "1",
        "--id",
        "fox",
        "--rendezvous",
        "127.0.0.1:1",
        "--interface",
        "none7",
        "--",
        "train",
        "r.toml",
    ]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: there is no network interface none7 here; it has ")

"""The batch script, and the states of Slurm's programs; a real Slurm runs in tests/services."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.cluster.job import Job
from armillary.cluster.slurm import Switch, allocation, domains_by_switch, files, read_state
from armillary.spec.tables.launch_target import Launch


def a_job(**launch: object) -> Job:
    return Job(
        name="keen-fox",
        target="slurm",
        folder=Path("/shared/jobs/keen-fox"),
        work=Path("/shared"),
        num_nodes=2,
        ranks_per_node=8,
        gpus_per_node=8,
        restarts=3,
        python="/env/bin/python",
        launch=Launch(port=29_500, **launch),  # type: ignore[arg-type]
    )


def script(job: Job) -> str:
    text = files(job, "")["slurm.sh"]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def test_the_batch_script() -> None:
    text = script(a_job(time_limit_s=3700, signal_s=90, partition="gpu", account="lab", options=("--qos=high",)))
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=keen-fox",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gres=gpu:8",
        "--time=62",
        "--partition=gpu",
        "--account=lab",
        "--signal=B:USR1@90",
        "--requeue",
        "--open-mode=append",
        '--output="/shared/jobs/keen-fox/logs/slurm.log"',
        '--chdir="/shared"',
        "--qos=high",
    ]
    assert text.index("#SBATCH --qos=high") < text.index("head=$("), "sbatch stops reading at the first command"
    assert "--output=/shared/jobs/keen-fox/logs/node-%n.log" in text and "scontrol requeue" in text
    assert "--nodes 2 --ranks 8 --id keen-fox --restarts 3 --stop-s 90" in text
    assert '--rendezvous "$address:29500"' in text


def test_a_folder_with_a_space_and_ranks_that_need_longer_than_the_signal() -> None:
    job = replace(a_job(signal_s=90), work=Path("/my work"), folder=Path('/my work/"x"'), grace_s=200.5)
    text = script(job)
    assert '#SBATCH --chdir="/my work"\n' in text and '#SBATCH --output="/my work/\\"x\\"/logs/slurm.log"\n' in text
    assert "#SBATCH --signal=B:USR1@201\n" in text and "--stop-s 200.5" in text
    assert allocation(job)[-1] == "--chdir=/my work", "no shell reads it"


def test_without_requeue_the_job_ends_at_its_limit() -> None:
    text = script(a_job(requeue=False, cpus_per_node=16, memory_bytes=64 * 2**30))
    assert "#SBATCH --no-requeue" in text and "scontrol requeue" not in text
    assert "#SBATCH --cpus-per-task=16" in text and "#SBATCH --mem=65536M" in text
    assert "--cpus-per-task=16" in text[text.index("\nsrun") :], "a step does not inherit it from its job"
    assert "--gres" not in script(replace(a_job(), gpus_per_node=0))


def test_setup_and_environment_come_before_the_ranks() -> None:
    text = script(a_job(setup=("module load cuda",), environment={"NCCL_DEBUG": "info it's"}))
    assert text.index("export NCCL_DEBUG='info it'\"'\"'s'") < text.index("module load cuda") < text.index("srun ")


def test_containers_by_pyxis_and_apptainer() -> None:
    pyxis = script(a_job(image="team/armillary:1", mounts=("/data:/data",)))
    assert "--container-image=team/armillary:1" in pyxis
    assert "--container-mounts=/shared:/shared,/shared/jobs/keen-fox:/shared/jobs/keen-fox,/data:/data" in pyxis
    apptainer = script(a_job(image="/images/armillary.sif", mounts=("/data:/data",)))
    assert "apptainer exec --nv --bind /shared --bind /shared/jobs/keen-fox --bind /data:/data" in apptainer
    assert "--container-image" not in apptainer


def test_an_allocation_asks_for_the_same() -> None:
    command = allocation(a_job(time_limit_s=60, signal_s=10, options=("--qos=high",)))
    assert command[0] == "salloc" and {"--nodes=2", "--gres=gpu:8", "--time=1", "--qos=high"} <= set(command)


@pytest.mark.parametrize(
    ("line", "state", "detail", "where"),
    [
        ("RUNNING|gpu[01-02]|None", "running", "", "gpu[01-02]"),
        ("PENDING||Resources", "pending", "Resources", ""),
        ("REQUEUED||BeginTime", "pending", "requeued, BeginTime", ""),
        ("CANCELLED by 1000|gpu01|", "cancelled", "", "gpu01"),
        ("CANCELLED+|gpu01|", "cancelled", "", "gpu01"),
        ("PREEMPTED|gpu01|", "stopped", "preempted", "gpu01"),
        ("TIMEOUT|gpu01|TimeLimit", "failed", "timeout, TimeLimit", "gpu01"),
        ("OUT_OF_MEMORY|gpu01|", "failed", "out of memory", "gpu01"),
        ("NOVEL|gpu01|", "unknown", "novel", "gpu01"),
    ],
)
def test_states(line: str, state: str, detail: str, where: str) -> None:
    found = read_state(line)
    assert (found.state, found.detail, found.where) == (state, detail, where)


def test_an_elastic_job_survives_its_nodes() -> None:
    text = script(replace(a_job(), least_nodes=1))
    assert "#SBATCH --nodes=1-2\n#SBATCH --no-kill\n" in text and "srun --wait=120 --no-kill " in text
    assert "--nodes 2 --least 1 --ranks 8" in text and "--devices 8 --yes" in text


def test_the_domains_of_nodes_are_their_switches() -> None:
    lines = (
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=tux[0-1]",
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=tux[2-3]",
        "SwitchName=s2 Level=1 LinkSpeed=1 Nodes=tux[0-3] Switches=s[0-1]",
    )
    hosts = {f"tux[{a}-{b}]": frozenset(f"tux{n}" for n in range(a, b + 1)) for a, b in ((0, 1), (2, 3), (0, 3))}
    found = domains_by_switch([Switch.of(line) for line in lines], hosts, ["tux1", "tux2", "tux2", "tux9"])
    assert found == {"tux1": ("switch=s2", "switch=s0"), "tux2": ("switch=s2", "switch=s1"), "tux9": ()}

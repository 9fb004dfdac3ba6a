"""One GPU and NCCL: every way of spreading a model, over one rank, gives what the plain model gives.

More ranks need more GPUs; what they exchange is held against one process on gloo.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import Transformer
from armillary.parallel import fsdp as data
from armillary.parallel import vocabulary
from armillary.parallel.apply import compile_blocks
from armillary.parallel.collectives import Group
from armillary.parallel.ddp import Replicas, sum_partial
from armillary.parallel.grad_norm import clip
from armillary.parallel.mesh import Mesh, make_mesh
from armillary.parallel.recompute import recompute
from armillary.parallel.shard_weights import fill_random, full_tensor, materialise
from armillary.parallel.tensor import apply_tensor_parallel
from armillary.parallel.world import World, abort_world
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, ModelConfig
from armillary.training.step.loss import loss_sum

pytestmark = pytest.mark.gpu
CONFIG = ModelConfig(
    name="small",
    hidden=256,
    heads=8,
    kv_heads=4,
    head_dim=32,
    ffn=512,
    vocab=1001,
    context=512,
    layers=(LayerKind(),) * 4,
)
ROWS, SEQUENCE, STEPS = 4, 256, 2


@dataclass(frozen=True)
class Way:
    """How a model is spread over the one rank."""

    tensor: str = ""
    """"", "whole" or "cut" tokens"""
    zero: int | None = None
    """None: not at all; 0: summed in buckets; 1, 3: shared out"""
    precision: str = "fp32"
    recompute: str = "none"
    compile: bool = False


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(tmp_path_factory.mktemp("nccl") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device)
    yield make_mesh(Layout(), World(rank=0, size=1, local_rank=0, device=device))
    abort_world()


def spread(way: Way, mesh: Mesh) -> tuple[Transformer, Group | None, Replicas | None]:
    with torch.device("meta"):
        model = Transformer(CONFIG)
    tp = None
    if way.tensor:
        again = set(model.blocks) if way.recompute == "none" else set()
        tp = apply_tensor_parallel(model, mesh.along("tp"), shard_tokens=way.tensor == "cut", regather=again)
    recompute(model, kind=way.recompute)
    if way.compile:
        torch._dynamo.reset()
        compile_blocks(model, tp)
    if way.zero:
        data.apply_fsdp(model, mesh.along("shard"), zero=way.zero, precision=way.precision)
    materialise(model, mesh.world.device)
    fill_random(model, seed=1)
    group = mesh.along("replicate").get_group()
    return model, tp, Replicas(model.parameters(), group, bucket_bytes=500_000) if way.zero == 0 else None


def trained(way: Way, mesh: Mesh) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a few steps of two micro-batches."""
    model, tp, replicas = spread(way, mesh)
    drawn = torch.randint(CONFIG.vocab, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(0)).cuda()
    positions = torch.arange(SEQUENCE, device="cuda").expand(ROWS // 2, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    half = torch.autocast("cuda", torch.bfloat16, enabled=way.precision == "bf16" and not way.zero)
    losses = []
    for _ in range(STEPS):
        for number, rows in enumerate(drawn.chunk(2)):
            last = number == 1
            if replicas is not None and last:
                replicas.arm()
            with data.micro_batch(model, zero=way.zero, last=last) if way.zero else nullcontext(), half:
                hidden = model(rows[:, :-1], positions, plain)
                if tp is None:
                    loss = loss_sum(model, hidden, rows[:, 1:], chunk=128)
                else:
                    cut = way.tensor == "cut"
                    loss = vocabulary.loss_sum(model, hidden, rows[:, 1:], chunk=128, group=tp, shard_tokens=cut)
                (loss / (ROWS * SEQUENCE)).backward()
            losses.append(loss.item())
        if replicas is not None:
            replicas.finish()
        if tp is not None and not way.zero:
            sum_partial(model.parameters(), mesh.along("tp").get_group())
        losses.append(clip(model.parameters(), mesh, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: full_tensor(parameter).float().clone() for name, parameter in model.named_parameters()}


@cache
def plainly(precision: str, mesh: Mesh) -> tuple[list[float], dict[str, Tensor]]:
    return trained(Way(precision=precision), mesh)


def check(way: Way, mesh: Mesh, *, losses: float, weights: float) -> None:
    found, wanted = trained(way, mesh), plainly(way.precision, mesh)
    assert found[0] == pytest.approx(wanted[0], rel=losses)
    for name, tensor in wanted[1].items():
        assert float((found[1][name] - tensor).norm() / tensor.norm()) < weights, name


@pytest.mark.parametrize(
    "way",
    [
        Way(zero=0),
        Way(zero=1, recompute="selective"),
        Way(zero=3, recompute="full"),
        Way(tensor="whole"),
        Way(tensor="cut"),
        Way(tensor="cut", zero=3, recompute="full"),
    ],
    ids=str,
)
def test_fp32_agrees_with_the_plain_model(way: Way, mesh: Mesh) -> None:
    """AdamW's first steps enlarge the rounding of another sum of exponentials: 3e-5 on a CPU too."""
    check(way, mesh, losses=1e-5, weights=1e-4)


@pytest.mark.parametrize(
    "way",
    [
        Way(zero=0, precision="bf16", recompute="selective"),
        Way(zero=3, precision="bf16"),
        Way(tensor="cut", precision="bf16"),
    ],
    ids=str,
)
def test_bf16_agrees_with_the_plain_model(way: Way, mesh: Mesh) -> None:
    check(way, mesh, losses=2e-2, weights=2e-2)


@pytest.mark.parametrize(
    "way",
    [
        Way(compile=True),
        Way(zero=3, recompute="full", compile=True),
        Way(tensor="cut", compile=True),
        Way(tensor="cut", recompute="full", compile=True),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("default")  # torch's compiler warns about its own code
def test_compiled_agrees_with_the_plain_model(way: Way, mesh: Mesh) -> None:
    check(way, mesh, losses=2e-5, weights=3e-4)


FOLDING = """
import torch, torch.distributed as dist
from torch._inductor.utils import run_and_get_code
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from armillary.model.layers.attention_forms import plain
from armillary.parallel.apply import compile_blocks
from armillary.parallel.tensor import apply_tensor_parallel
from armillary.model.transformer import build
from tests.parallel.test_parallel_on_gpu import CONFIG

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("tp",))
model = build(CONFIG, dtype=torch.bfloat16, device="cuda", seed=1)
compile_blocks(model, apply_tensor_parallel(model, mesh, shard_tokens=True), overlap=True)
x = torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
cos_sin = model.rotary(torch.arange(128, device="cuda").expand(2, -1))
with _test_mode():
    _, codes = run_and_get_code(lambda: model.blocks["0"](x, cos_sin, plain, 0).float().sum().backward())
text = "".join(codes)
print(text.count("symm_mem.fused_all_gather_matmul"), text.count("symm_mem.fused_matmul_reduce_scatter"))
"""


def test_the_compiler_folds_exchanges_into_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks that are only pretended: whether the graph is one that torch's asynchronous form fits."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FOLDING], capture_output=True, text=True, cwd=root, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    gathers, scatters = map(int, done.stdout.split()[-2:])
    assert gathers >= 2 and scatters >= 2

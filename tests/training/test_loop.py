"""The loop: losses fall, micro-batches and chunks change nothing, a run ends with an export or a clear line."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from armillary.errors import ArmillaryError, BadData, BadInput
from armillary.model.weights.hf_weights import load_model
from armillary.parallel.world import World
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe
from armillary.spec.tables.model import ModelTable
from armillary.store.gauges import columns
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model
from armillary.store.runs import find_run
from armillary.training.loop import out_of_memory, train
from armillary.training.prepare_run import ResolvedRun, model_source, resolve_run, train_recipe
from armillary.training.telemetry.step_telemetry import StepReport
from armillary.training.trainer import Trainer
from tests.model.families import transformers

Make = Callable[..., Recipe]


def begin(recipe: Recipe, home: Home) -> ResolvedRun:
    return resolve_run(recipe, home, model_source(recipe, home))


def alone(device: str = "cpu") -> World:
    return World(rank=0, size=1, local_rank=0, device=torch.device(device))


def losses(recipe: Recipe, home: Home, steps: int = 4, device: str = "cpu") -> list[float]:
    begun = begin(recipe, home)
    begun.prepare()
    with Trainer(begun.plan, alone(device)) as trainer:
        reports = [trainer.step(step) for step in range(steps)]
    return [report.gauges["loss"] for report in reports if report is not None]


def test_a_run_from_recipe_to_export(recipe: Make, home: Home) -> None:
    seen: list[StepReport] = []
    done = train_recipe(recipe("train.steps=40", "train.lr=0.01"), home=home, watch=seen.append)
    assert done.finished and done.steps == len(seen) == 40
    assert seen[0].gauges["loss"] == pytest.approx(math.log(320), rel=0.05), "an untrained model knows nothing"
    assert done.loss < 0.5 * seen[0].gauges["loss"]
    assert done.val_loss is not None and done.val_loss < 0.6 * seen[0].gauges["loss"]
    run = find_run(home, done.run.name)
    assert run.state.state == "finished" and run.state.step == 40
    table = columns(run.gauges, ["loss", "val_loss", "step_s", "data_wait_s", "grad_norm", "lr", "host_memory_bytes"])
    assert table["loss"] == [report.gauges["loss"] for report in seen]
    assert len([value for value in table["val_loss"] if value is not None]) == 7  # every 6 steps and at the end
    plan = Plan.from_json(run.plan.read_text())
    assert plan.model.num_layers == 2 and plan.train is not None and plan.train.steps == 40


def test_out_of_memory_says_what_was_planned_and_what_to_try(
    recipe: Make, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*_args: object, **_more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 18.55 GiB.")

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(ArmillaryError, match=r"on rank 0 \(cpu\), planned 3.00 GB; try --set layout.recompute=full$"):
        plan = begin(recipe(), home).plan
        raise out_of_memory(replace(plan, predicted={"memory_peak_bytes": 3e9}), alone())
    with pytest.raises(ArmillaryError, match=r"on rank 0 \(cpu\); try --set layout.recompute=full$"):
        train_recipe(recipe(), home=home)


def test_the_export_is_a_model_for_everything_else(recipe: Make, home: Home) -> None:
    done = train_recipe(recipe(), home=home)
    source = resolve_model(done.run.name, home, need_weights=True)
    assert source.origin == "run" and source.folder == done.export
    theirs = transformers.AutoModelForCausalLM.from_pretrained(done.export)
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.export)
    generation = json.loads((done.export / "generation_config.json").read_text())
    assert theirs.config.eos_token_id == generation["eos_token_id"]
    assert tokenizer.decode(tokenizer.encode("def f(x):", add_special_tokens=False)) == "def f(x):"


def test_micro_batches_give_the_same_losses(recipe: Make, home: Home) -> None:
    whole = losses(recipe("layout.micro_batch=8"), home)
    parts = losses(recipe("layout.micro_batch=1"), home)
    pairs = losses(recipe("layout.micro_batch=2"), home)
    assert parts == pytest.approx(whole, rel=1e-6) and pairs == pytest.approx(whole, rel=1e-6)


def test_micro_batches_with_different_numbers_of_targets_give_the_same_losses(recipe: Make, home: Home) -> None:
    """Whole documents leave padding, so rows have different numbers of targets; every target weighs the same."""

    def counted(micro_batch: int) -> tuple[list[float], set[int]]:
        begun = begin(recipe(f"layout.micro_batch={micro_batch}", "data.packing=whole", "train.sequence=64"), home)
        begun.prepare()
        with Trainer(begun.plan, alone()) as trainer:
            counts = {row for step in range(3) for row in trainer.batches._fetch(step, lambda: False).rows.row_targets}
            reports = [trainer.step(step) for step in range(3)]
        return [report.gauges["loss"] for report in reports if report is not None], counts

    (one, counts), (whole, _) = counted(1), counted(4)
    assert len(counts) > 1 and one == pytest.approx(whole, rel=1e-6)


def test_a_step_on_a_processor_waits_for_its_own_rows(recipe: Make, home: Home) -> None:
    begun = begin(recipe(), home)
    begun.prepare()
    seen: list[tuple[int, int]] = []
    with Trainer(begun.plan, alone()) as trainer:
        batches, fetch = trainer.batches, trainer.batches._fetch
        for now in range(3):
            batches._fetch = lambda step, stop, now=now: seen.append((now, step)) or fetch(step, stop)  # type: ignore
            trainer.step(now)
    assert seen == [(0, 0), (1, 1), (2, 2)]


def test_chunks_of_the_loss_give_the_same_losses(recipe: Make, home: Home) -> None:
    assert losses(recipe("train.loss_chunk=7"), home) == pytest.approx(
        losses(recipe("train.loss_chunk=0"), home), rel=1e-6
    )


def test_the_same_recipe_gives_bit_equal_losses(recipe: Make, home: Home) -> None:
    assert losses(recipe(), home) == losses(recipe(), home)
    assert losses(recipe(), home) != losses(recipe("train.seed=1"), home)
    assert losses(recipe(), home) != losses(recipe("data.seed=1"), home)


def test_held_out_loss_is_of_the_same_text_whatever_the_micro_batch(recipe: Make, home: Home) -> None:
    found = []
    for micro_batch in (1, 4, 8):
        begun = begin(recipe(f"layout.micro_batch={micro_batch}"), home)
        begun.prepare()
        found.append(Trainer(begun.plan, alone()).validate())
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


def test_validation_has_no_dropout_and_takes_no_random_numbers(recipe: Make, home: Home) -> None:
    dropout = ["train.lora_rank=4", "train.lora_dropout=0.5", "train.lr=0.01"]
    begun = begin(recipe(*dropout), home)
    begun.prepare()

    def losses_with(validations: int) -> tuple[list[float], list[float | None]]:
        with Trainer(begun.plan, alone()) as trainer:
            torch.manual_seed(0)
            found, held_out = [], []
            for step in range(3):
                report = trainer.step(step)
                assert report is not None
                found.append(report.gauges["loss"])
                held_out = [trainer.validate() for _ in range(validations)]
            return found, held_out

    without, _ = losses_with(0)
    found, held_out = losses_with(2)
    assert held_out[0] == held_out[1] and found == without


def test_a_deterministic_run_leaves_torch_as_it_was(recipe: Make, home: Home) -> None:
    done = train_recipe(recipe("train.deterministic=true", "layout.precision=tf32", "train.steps=2"), home=home)
    assert done.finished
    assert not torch.are_deterministic_algorithms_enabled() and torch.get_float32_matmul_precision() == "highest"


def test_a_mixture_of_experts_trains(recipe: Make, home: Home) -> None:
    experts = [
        "model.family=mixtral",
        "model.ffn=0",
        "model.moe_every=1",
        "model.moe.num_experts=4",
        "model.moe.top_k=2",
        "model.moe.ffn=32",
        "model.moe.aux_loss=0.01",
        "layout.precision=bf16",
    ]
    begun = begin(recipe(*experts), home)
    begun.prepare()
    assert train(begun.plan, begun.create_run()).loss < 6


def test_bf16_stays_near_fp32(recipe: Make, home: Home) -> None:
    assert losses(recipe("layout.precision=bf16"), home) == pytest.approx(losses(recipe(), home), rel=0.02)


def test_training_goes_on_from_weights(recipe: Make, home: Home) -> None:
    first = train_recipe(recipe("train.steps=40", "train.lr=0.01"), home=home)
    base = recipe("train.steps=2", "train.lr=1e-5", "train.warmup_steps=0")
    again = replace(base, model=ModelTable(path=str(first.export)))
    second = train_recipe(again, home=home)
    assert second.val_loss == pytest.approx(first.val_loss, rel=0.05)
    before, after = load_model(first.export), load_model(second.export)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    other = replace(again, model=ModelTable(path=str(first.export), overrides={"ffn": 96}))
    with pytest.raises(BadInput, match=r"its shape cannot be overridden; leave model.ffn out, or .*from_scratch"):
        begin(other, home)
    shape_only = begin(replace(again, train=replace(again.train, from_scratch=True)), home)
    assert shape_only.plan.weights == "" and begin(again, home).plan.weights == str(first.export)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_and_keeps_the_model(number: signal.Signals, recipe: Make, home: Home) -> None:
    def interrupt(report: StepReport) -> None:
        if report.step == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    done = train_recipe(recipe("train.steps=500"), home=home, watch=interrupt)
    assert not done.finished and done.steps in (3, 4, 5)
    assert done.run.state.state == "interrupted"
    assert done.run.checkpoint_steps() == [done.steps] and done.export is None
    assert signal.getsignal(number) == before


def test_a_loss_that_is_no_number_ends_the_run(recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.lr=1e30", "train.warmup_steps=0", "train.clip=0"), home)
    run = begun.create_run()
    with pytest.raises(ArmillaryError, match=r"is (nan|inf) at step \d+; the step was not taken .* --set train.lr="):
        begun.prepare()
        train(begun.plan, run)
    assert run.state.state == "failed" and "train.lr" in run.state.error
    assert run.latest_export() is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["layout.tp=3"], "tp=3 does not divide"),
        (["layout.offload=both", "layout.recompute=selective"], "does not cover what selective recompute stores; try"),
        (["train.sequence=256"], "longer than the context"),
        (["train.batch_tokens=100"], "batch_tokens"),
        (["model.ffnn=3"], "did you mean ffn"),
        (["layot.tp=2"], "did you mean .layout."),
        (["model.norm_at=after"], "a 'llama' config.json cannot express norm_at"),
        (["model.family=gpt2"], "model_type 'gpt2' are not supported"),
        (["model.qk_norm=head"], "cannot express qk_norm"),
        (["train.min_lr=1"], r"min_lr=1.0 must be at most the peak learning rate of 0.003; try --set train.min_lr="),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_before_anything_is_written(
    overrides: list[str], expected: str, recipe: Make, home: Home
) -> None:
    with pytest.raises(BadInput, match=expected) as caught:
        begin(recipe(*overrides), home)
    assert "\n" not in str(caught.value)
    assert not home.runs.exists() and not home.data.exists()


def test_data_with_more_ids_than_the_model_is_refused(recipe: Make, home: Home) -> None:
    (made,) = begin(recipe(), home).prepare()
    folder = made.folder
    small = begin(recipe("model.vocab=300", f"data.path={folder}"), home)
    with pytest.raises(BadData, match=r"beyond the model's vocabulary of 300; prepare it with --tokenizer 300"):
        Trainer(small.plan, alone())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's compiler warns about its own code
@pytest.mark.skipif(not shutil.which("c++"), reason="compiled CPU code needs a C++ compiler (Debian: apt install g++)")
def test_compiled_blocks_give_the_same_losses(recipe: Make, home: Home) -> None:
    assert losses(recipe("train.compile=true"), home) == pytest.approx(losses(recipe(), home), rel=1e-5)

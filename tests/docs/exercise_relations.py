"""What must hold in the tables of the exercises, whatever the machine: `RELATIONS[exercise](tables, timed)` asserts it.
`timed` adds what depends on the clock: it is asked of the pages that we publish, never of a test's own run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

Row = dict[str, str]
Table = list[Row]
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "ms": 1e-3, "s": 1.0, "k": 1e3, "%": 1e-2}


def tables(text: str) -> list[Table]:
    """The tables in a Markdown text, each row by its heads."""
    found: list[Table] = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.strip().splitlines()]
        found.append([dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]])
    return found


def number(text: str) -> float:
    """The first quantity of a cell in its base unit: 85.0 MB, 1.51 ×, $4,700.75, 12 %, 1:05."""
    plain = text.replace("**", "").replace("$", "").replace(",", "").replace("−", "-").strip()
    if clock := re.match(r"(\d+):(\d\d)$", plain):
        return 60.0 * int(clock[1]) + int(clock[2])
    found = re.match(r"([+-]?[\d.]+)\s*([A-Za-z%]*)", plain)
    assert found, text
    return float(found[1]) * UNITS.get(found[2], 1.0)


def column(rows: Table, head: str) -> list[float]:
    return [number(row[head]) for row in rows]


def falls(values: Sequence[float], slack: float = 1.0) -> bool:
    return all(later <= slack * earlier for earlier, later in pairwise(values))


# --- one function per exercise


def amdahl(found: list[Table], timed: bool) -> None:
    one_thread = [row for row in found[0] if "threads" not in row["program"]]
    for row in one_thread:
        hand, most = number(row["by hand: 1/(1 − p + p/s)"]), number(row["at most"])
        p, s = number(row["share p"]), number(row["faster by s"])
        assert abs(hand - 1 / (1 - p + p / s)) < 0.03 * hand and hand <= most, row
        assert not timed or (s > 1 and abs(number(row["error"])) <= 0.15), row
    for program, grows in (("prefill", True), ("training step", False)):
        shares = column([row for row in one_thread if row["program"].startswith(program)], "share p")
        assert not timed or falls([-share if grows else share for share in shares]), shares


def attention_roofline(found: list[Table], timed: bool) -> None:
    for at in range(0, len(found[0]), 3):
        rows = {row["version"]: row for row in found[0][at : at + 3]}
        moved = [number(rows[name]["operators move"]) for name in ("naive", "tiled", "fused")]
        assert falls(moved) and moved[-1] >= number(rows["fused"]["at least"]), moved
        assert number(rows["fused"]["peak memory"]) < number(rows["naive"]["peak memory"])
        assert not timed or number(rows["fused"]["time"]) < number(rows["naive"]["time"])
        assert not timed or all(number(row["of that of the cache"]) <= 1.05 for row in rows.values()), rows


def autoscaling(found: list[Table], timed: bool) -> None:
    """On a virtual clock, so nothing of it depends on the machine."""
    rows = {row["fleet"]: row for row in found[0]}
    scaled = [row for name, row in rows.items() if name.startswith("autoscaled")]
    most = rows["4 replicas"]
    assert scaled and all(number(row["replica hours"]) < number(most["replica hours"]) for row in scaled)
    fixed = [number(rows[name]["in time"]) for name in ("4 replicas", "2 replicas", "1 replica") if name in rows]
    assert falls(fixed), fixed
    slow, quick = (rows.get(f"autoscaled, start in {seconds} s") for seconds in (60, 10))
    assert slow is None or quick is None or number(quick["in time"]) >= number(slow["in time"])


def checkpoint_chaos(found: list[Table], timed: bool) -> None:
    for row in found[0]:
        assert row["tensors that differ"].startswith("0 of ") and row["same weights, bit for bit"] == "yes", row
        intervals = 3 if "bit flips" in row["attack"] else 2
        lost = re.findall(r"\d+", row["steps lost at each"])
        assert all(int(steps) <= intervals * 10 for steps in lost), row


def ddp_scaling(found: list[Table], timed: bool) -> None:
    for row in found[0]:
        hidden, bare = (number(part) for part in row["predicted: hidden … bare"].split("…"))
        assert 0 < bare <= hidden <= 1, row
        one, two = number(row["tokens/s on 1"]), number(row["on 2"])
        efficiency = two / one / 2
        assert abs(efficiency - number(row["efficiency"])) < 0.02, row
        assert not timed or 0.35 <= efficiency <= 1.05, row
    for one_rank, same_batch, twice in found[1:]:
        assert one_rank["batch"] == same_batch["batch"] and number(twice["batch"]) == 2 * number(one_rank["batch"])
        if timed:
            assert number(same_batch["steps"]) == pytest.approx(number(one_rank["steps"]), rel=0.35), "the same steps"
            assert number(twice["steps"]) > 0.5 * number(same_batch["steps"]), "twice the batch is no two steps"
    for row in (row for rows in found[1:] for row in rows):
        head = next(head for head in row if head.startswith("time to"))
        seconds = number(row["batch"]) * number(row["steps"]) / number(row["images/s"])
        assert seconds == pytest.approx(number(row[head]), rel=0.02), row


def moe_balance(found: list[Table], timed: bool) -> None:
    rows = {row["balanced by"]: row for row in found[0]}
    for row in rows.values():
        ratio = number(row["at the end"])
        assert 1 <= ratio <= 4 and abs(number(row["8 devices busy"]) - 1 / ratio) < 0.02, row
        assert ("capacity" in row["balanced by"]) or number(row["choices dropped"]) == 0, row
    if "auxiliary loss, 0.1" in rows:  # enough steps to become balanced
        ends = {name: number(row["at the end"]) for name, row in rows.items()}
        assert ends["selection bias"] < ends["nothing"] and ends["auxiliary loss, 0.1"] < ends["auxiliary loss, 0.01"]
        dropped = [number(rows[f"{name}, capacity 1.25"]["choices dropped"]) for name in ("nothing", "selection bias")]
        assert dropped[1] < dropped[0], dropped


def pipeline_bubbles(found: list[Table], timed: bool) -> None:
    for row in found[0]:
        micro_batches = int(row["micro-batches"])
        assert int(row["held, GPipe"]) == micro_batches and int(row["held, 1F1B"]) <= min(4, micro_batches), row
        for name in ("GPipe", "1F1B"):
            idle, formula = number(row[f"idle, {name}"]), number(row["formula"])
            assert not timed or abs(idle - formula) < 0.02, row
    assert falls(column(found[0], "formula"))


def plan_to_documents(found: list[Table], timed: bool) -> None:
    figures, prices = found
    assert len({row["in"] for row in figures}) == 1, "every format has every figure"
    for before, after in pairwise(prices):
        factor = number(after["device-hour"]) / number(before["device-hour"])
        assert abs(number(after["run"]) / number(before["run"]) - factor) < 0.01, (before, after)


def precision(found: list[Table], timed: bool) -> None:
    for rows in (rows for rows in found if "peak memory" in rows[0]):
        by = {row["precision"]: row for row in rows}
        assert all(number(by[name]["peak memory"]) < number(by["fp32"]["peak memory"]) for name in ("fp16", "bf16"))
        assert not timed or falls([number(by["fp32"]["accuracy"]), *(number(row["accuracy"]) for row in rows)], 1.05)
    for rows in (rows for rows in found if "batch" in rows[0]):
        for row in rows:
            for name in ("fp16", "bf16"):
                gain = number(row[f"{name}, images/s"]) / number(row["fp32, images/s"])
                assert gain == pytest.approx(number(row[f"{name} against fp32"]), abs=0.05, rel=0.05), row
        rates = column(rows, "fp32, images/s")
        assert not timed or rates[-1] > rates[0], "a larger batch keeps a device busier"


def serving_speedups(found: list[Table], timed: bool) -> None:
    for row in found[0]:
        gain, most = number(row["gain"]), row["at most, by hand"]
        assert gain > 0 and (most == "–" or not timed or gain <= 1.15 * number(most)), row
        if row["lever"] in ("continuous batching", "prefix cache"):
            assert not timed or gain > 1.1, row
    int8 = {row["on what"].split()[0]: number(row["gain"]) for row in found[0] if row["lever"] == "int8 weights"}
    assert not timed or (int8["one"] > 1 and int8["8"] < int8["one"]), "a lever on bytes is worth less in a batch"


def zero_memory(found: list[Table], timed: bool) -> None:
    measured = [row for row in found[0] if row["rank 0"] not in ("–", "")]
    for precision_name in ("fp32", "bf16"):
        rows = [row for row in measured if row["on two ranks"].endswith(precision_name)]
        assert falls(column(rows, "rank 0")) and falls(column(rows, "planned")), rows
        for row in rows[1:]:
            assert number(row["optimizer"]) <= 0.51 * number(rows[0]["optimizer"]), "a rank keeps half"
    assert all(abs(number(row["error"])) <= 0.10 for row in measured), measured


def simplicial_pairs(found: list[Table], timed: bool) -> None:
    rows = {row["model"]: row for row in found[0]}
    pairs, plain = rows["2-simplicial, 1 layer"], rows["attention, 1 layer"]
    assert number(pairs["weights"]) > number(plain["weights"]) and number(plain["at 1,024 tokens"]) == 1
    assert number(pairs["at 1,024 tokens"]) > 20 * number(pairs["FLOPs of a head at 8 tokens"]) > 20
    if "attention, 2 layers" in rows:  # enough steps to learn it
        right = {name: number(row["right"]) for name, row in rows.items()}
        assert right["2-simplicial, 1 layer"] > 0.97, right
        assert right["2-simplicial, 1 layer"] > max(right[name] for name in rows if name.startswith("attention")) + 0.03
        assert number(pairs["loss"]) < 0.5 * number(plain["loss"])


RELATIONS: dict[str, Callable[[list[Table], bool], None]] = {
    "amdahl": amdahl,
    "attention_roofline": attention_roofline,
    "autoscaling": autoscaling,
    "checkpoint_chaos": checkpoint_chaos,
    "ddp_scaling": ddp_scaling,
    "moe_balance": moe_balance,
    "pipeline_bubbles": pipeline_bubbles,
    "plan_to_documents": plan_to_documents,
    "precision": precision,
    "serving_speedups": serving_speedups,
    "simplicial_pairs": simplicial_pairs,
    "zero_memory": zero_memory,
}
"""exercise -> its relations; resnet50 prints no table but budgets, which its test sums up"""

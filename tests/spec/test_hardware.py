"""The hardware catalogue: every figure has a source, popular mistakes are put right, hardware strings resolve."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.errors import BadInput, NotFound
from armillary.spec import catalogue
from armillary.spec.hardware import DTYPE_BYTES, DTYPES, Chip, Cluster, Link, Node, Storage, Tier

CHIPS, LINKS, NODES = catalogue.chips(), catalogue.links(), catalogue.nodes()
FIGURES = ("memory_bytes", "memory_bytes_per_s", "l2_bytes", "num_sms", "tdp_w", "list_price_usd")
WITHOUT_NODE = {"sn40l", "snapdragon-x-elite"}  # nothing published says how several are joined


def peak_keys(chip: Chip) -> list[str]:
    """The chip's peaks as the TOML names them."""
    return [
        f"{prefix}{dtype}_{'ops' if dtype == 'int8' else 'flops'}"
        for prefix, peaks in (("", chip.flops), ("sparse_", chip.sparse_flops))
        for dtype in peaks
    ]


def words(names: str) -> list[str]:
    return names.split()


# --- the rows


def test_the_catalogue_is_wide() -> None:
    assert len(CHIPS) >= 35
    wanted = """p100 v100 v100-32gb t4 a10 a10g a100 a100-40gb a100-80gb a6000 l4 l40s rtx-4090 h100 h100-pcie h200
        b200 gb200 gb300 mi250x mi300x tpu-v3 tpu-v4 tpu-v5e tpu-v5p tpu-v6e trainium1 trainium2 inferentia1 inferentia2
        gaudi2 gaudi3 ipu wse-3 sambanova m3 m4 snapdragon cpu h100-96gb-hbm2e"""
    assert {catalogue.chip(name).name for name in words(wanted)} <= set(CHIPS)
    wanted = """nvlink-2 nvlink-3 nvlink-4 nvlink-5 nvswitch-3 pcie3-x16 pcie4-x16 pcie5-x16 ib-hdr ib-ndr ib-xdr
        roce-400g ethernet-10g ethernet-25g ethernet-100g ethernet-400g efa-400g ici-v3 ici-v4 ici-v5e ici-v5p
        ici-v6e"""
    assert set(words(wanted)) <= set(LINKS)
    wanted = "hbm dram nvme-gen3 nvme-gen4 nvme-gen5 sata-ssd hdd nas lustre s3"
    assert set(words(wanted)) <= set(catalogue.storages())


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_every_figure_of_a_chip_has_a_source(chip: Chip) -> None:
    figures = [name for name in FIGURES if getattr(chip, name) is not None] + peak_keys(chip)
    assert not [figure for figure in figures if not chip.source_of(figure)]
    assert all(getattr(chip, name) > 0 for name in FIGURES if getattr(chip, name) is not None)
    known = {field.name for field in dataclasses.fields(Chip)} | set(peak_keys(chip)) | {"all"}
    assert set(chip.sources) <= known, "a source of a figure that the row does not give"
    assert chip.frameworks and chip.precisions and chip.memory_bytes


def test_links_nodes_and_storage_have_sources_and_sane_figures() -> None:
    rows: list[Link | Node | Storage] = [*LINKS.values(), *NODES.values(), *catalogue.storages().values()]
    assert not [row.name for row in rows if not row.source]
    for link in LINKS.values():
        assert 1e9 < link.bytes_per_s < 2e12, link.name
        assert 1e-7 < link.latency_s < 1e-3, link.name
    for node in NODES.values():
        assert node.num_chips >= 1 and node.domain >= 1 and node.oversubscription >= 1 and node.num_drives >= 1


def test_storage_gets_slower_on_the_way_down() -> None:
    tiers = [catalogue.storages()[name] for name in words("hbm dram nvme-gen5 nvme-gen4 nvme-gen3 sata-ssd hdd")]
    speeds = [tier.read_bytes_per_s for tier in tiers]
    assert speeds == sorted(speeds, reverse=True)
    assert catalogue.storages()["s3"].latency_s > catalogue.storages()["nas"].latency_s > tiers[4].latency_s


def test_every_reference_exists() -> None:
    storages = catalogue.storages()
    for chip in CHIPS.values():
        assert chip.node in NODES or chip.name in WITHOUT_NODE, chip.name
        assert not chip.node or NODES[chip.node].chip == chip.name, chip.name
        assert chip.host_link in LINKS or not chip.host_link, chip.name
    for node in NODES.values():
        assert node.chip in CHIPS and node.link in LINKS and node.network in LINKS, node.name
        assert node.storage in storages or not node.storage, node.name
        assert node.shape == "torus" or LINKS[node.link].kind != "torus", node.name


def test_names_and_aliases_are_unique_and_lower_case() -> None:
    names = [name for rows in (CHIPS, NODES) for row in rows.values() for name in (row.name, *row.aliases)]
    assert [name for name, times in Counter(names).items() if times > 1] == []
    assert [name for name in names if name != name.lower() or name != name.strip()] == []


# --- peaks


def test_precisions_cover_the_peaks() -> None:
    for chip in CHIPS.values():
        assert {*chip.flops, *chip.sparse_flops} <= set(chip.precisions) <= set(DTYPE_BYTES), chip.name
        assert {*chip.flops, *chip.sparse_flops} <= set(DTYPES), chip.name


def test_sparse_is_twice_dense_and_never_passed_off_as_dense() -> None:
    for chip in CHIPS.values():
        for dtype, sparse in chip.sparse_flops.items():
            dense = chip.flops.get(dtype, 0.0)
            assert sparse > dense * 1.2, (chip.name, dtype)
            blackwell_ultra_fp4 = chip.name in ("b300", "gb300") and dtype == "fp4"  # 4 sparse for 3 dense
            if chip.vendor == "NVIDIA" and dense and not blackwell_ultra_fp4:
                assert sparse / dense == pytest.approx(2, rel=0.02), (chip.name, dtype)


def test_fewer_bits_are_never_slower() -> None:
    for chip in CHIPS.values():
        for wide, narrow in (("fp64", "fp32"), ("fp32", "bf16"), ("tf32", "bf16"), ("bf16", "fp8"), ("fp8", "fp4")):
            if wide in chip.flops and narrow in chip.flops:
                assert chip.flops[wide] <= chip.flops[narrow], (chip.name, wide, narrow)
        if "fp16" in chip.flops and "bf16" in chip.flops:
            assert chip.flops["fp16"] == chip.flops["bf16"], chip.name


DENSE_BF16 = {  # TFLOP/s
    "h100": 989.4,
    "h200": 989.4,
    "h100-pcie": 756.5,
    "a100": 312,
    "a100-40gb": 312,
    "a10": 125,
    "a10g": 70,
    "l4": 121,
    "a6000": 154.8,
    "l40s": 362.05,
    "4090": 165.2,
    "b200": 2250,
    "gb200": 2500,
    "gb300": 2500,
    "mi300x": 1307.4,
    "mi250x": 383,
    "v5p": 459,
    "v5e": 197,
    "v4": 275,
    "v6e": 918,
    "trainium1": 190,
    "gaudi3": 1835,
}


@pytest.mark.parametrize("name", DENSE_BF16)
def test_dense_bf16_peaks(name: str) -> None:
    assert catalogue.chip(name).peak("bf16") == pytest.approx(DENSE_BF16[name] * 1e12)


def test_popular_mistakes_are_put_right() -> None:
    h100 = catalogue.chip("h100")
    assert h100.sparse_flops["bf16"] == pytest.approx(1978.9e12)
    assert h100.peak("fp8") == h100.sparse_flops["bf16"]
    assert catalogue.chip("h200").memory_bytes == 141e9
    assert catalogue.chip("mi300x").peak("fp16") != catalogue.chip("mi300x").sparse_flops["fp16"] == 2614.9e12
    assert catalogue.chip("b200").peak("fp8") == 4500e12
    assert catalogue.chip("wse-3").peak("fp16") is None, "125 PFLOP/s is sparse, the dense rate is unpublished"
    for old in ("p100", "v100", "v100-32gb", "t4"):
        assert catalogue.chip(old).peak("bf16") is None
        assert "bf16" not in catalogue.chip(old).precisions
    assert catalogue.chip("a100").peak("fp8") is None
    part = catalogue.chip("h100-96gb-hbm2e")
    assert (part.memory_bytes, part.memory_bytes_per_s, part.tdp_w) == (96e9, 2.4e12, 500)


def test_links_count_one_direction() -> None:
    assert [LINKS[f"nvlink-{i}"].bytes_per_s for i in (2, 3, 4, 5)] == [150e9, 300e9, 450e9, 900e9]
    assert LINKS["ib-ndr"].bytes_per_s == 50e9
    assert LINKS["ici-v5p"].bytes_per_s == 600e9


def test_misspelt_peaks_are_refused() -> None:
    row: dict[str, Any] = {"title": "x", "vendor": "x", "kind": "gpu"}
    chip = catalogue._chip("x", row | {"bf16_flops": 2, "int8_ops": 3, "sparse_int8_ops": 6, "l2_bytes": 1})
    assert (chip.flops, chip.sparse_flops, chip.l2_bytes) == ({"bf16": 2, "int8": 3}, {"int8": 6}, 1)
    for key in ("bf61_flops", "int8_flops", "bf16_ops", "sparse_l2_bytes"):
        with pytest.raises(BadInput, match=f"unknown key '{key}'"):
            catalogue._chip("x", row | {key: 1})


# --- prices


def test_prices_are_positive_and_name_known_chips() -> None:
    prices = [price for chip in CHIPS for price in catalogue.prices(chip)]
    assert len(prices) > 100
    assert len({(price.chip, price.provider) for price in prices}) == len(prices)
    for price in prices:
        assert price.chip in CHIPS and price.provider != "mithril"
        assert 0.05 < price.usd_per_hour < 50, price
        assert price.spot_usd_per_hour is None or 0 < price.spot_usd_per_hour < price.usd_per_hour, price
        assert price.date == "2026-08-22" and "skypilot-catalog" in price.source
    assert {price.chip for price in prices} >= {"h100-sxm", "a100-80gb-sxm", "h200", "b200", "l4", "tpu-v5p", "mi300x"}


# --- hardware strings


def test_h100x64_is_eight_by_eight() -> None:
    found = catalogue.cluster("h100x64")
    assert (found.num_devices, found.fast_domain, found.chip.name) == (64, 8, "h100-sxm")
    assert [(tier.count, tier.link.name) for tier in found.tiers] == [(8, "nvlink-4"), (8, "ib-ndr")]
    assert found.text() == "64 × H100 SXM: 8 by NVLink 4, 8 by InfiniBand NDR"
    assert found.node is not None and found.node.name == "dgx-h100"


@pytest.mark.parametrize(
    ("text", "chip", "counts"),
    [
        ("h100", "h100-sxm", []),
        ("h100x5", "h100-sxm", [5]),
        ("h100x16384", "h100-sxm", [8, 2048]),
        ("dgx-h200", "h200", [8]),
        ("dgx-h200x8", "h200", [8, 8]),
        ("gb200x72", "gb200", [72]),
        ("gb200x144", "gb200", [72, 2]),
        ("gb200-trayx5", "gb200", [20]),
        ("gb200-nvl72x2", "gb200", [72, 2]),
        ("v5px256", "tpu-v5p", [256]),
        ("tpu-v5ex512", "tpu-v5e", [256, 2]),
        ("mi300x", "mi300x", []),
        ("mi300x8", "mi300x", [8]),
        ("mi300xx8", "mi300x", [8]),
        ("trn2.48xlarge", "trainium2", [16]),
        ("trn2ux8", "trainium2", [64, 2]),
        ("m4-maxx4", "m4-max", [4]),
        (" 4090X8 ", "rtx-4090", [8]),
        ("p5x2", "h100-sxm", [8, 2]),
    ],
)
def test_hardware_strings(text: str, chip: str, counts: list[int]) -> None:
    found = catalogue.cluster(text)
    assert (found.chip.name, [tier.count for tier in found.tiers]) == (chip, counts)
    assert found.num_devices == math.prod(counts)


def test_chips_that_share_a_port_get_their_share_of_it() -> None:
    inside, between = catalogue.cluster("p4dx4").tiers
    assert (inside.oversubscription, inside.bytes_per_s) == (1, 300e9)
    assert between.bytes_per_s == pytest.approx(4 * 100e9 / 8 / 8)  # 4 cards of 100 Gb/s for 8 GPUs


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("h100x0", BadInput, "'h100x0' has 0 devices; write at least one, like h100x8"),
        ("h100x-8", BadInput, "'h100x-8' has -8 devices"),
        ("h10x8", NotFound, "no hardware 'h10'; did you mean h100?"),
        ("dgx-h10x8", NotFound, "did you mean dgx-h100?"),
        ("zzz", NotFound, "no hardware 'zzz'; armillary hardware lists"),
        ("h100x13", BadInput, "13 do not fill DGX H100 nodes of 8; try h100x8 or h100x16"),
        ("gb200x100", BadInput, "domains of 72; try gb200x72 or gb200x144"),
        ("trn2ux5", BadInput, "domains of 4 nodes; try trn2ux4 or trn2ux8"),
        ("sn40lx2", BadInput, "sn40l has no default node; describe the tiers in [hardware]"),
    ],
)
def test_bad_hardware_strings_say_what_to_write(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        catalogue.cluster(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_chips_and_links_offer_the_nearest_name() -> None:
    with pytest.raises(NotFound, match="did you mean mi300x"):
        catalogue.chip("mi330x")
    with pytest.raises(NotFound, match="did you mean nvlink-4"):
        catalogue.link("nvlnk-4")


NAMES = [name for chip in CHIPS.values() for name in (chip.name, *chip.aliases)]


@given(st.sampled_from(NAMES), st.integers(1, 40_000))
def test_chipxn_has_n_chips_or_suggests_sizes_that_do(name: str, num: int) -> None:
    try:
        found = catalogue.cluster(f"{name}x{num}")
    except BadInput as error:
        if catalogue.chip(name).name not in WITHOUT_NODE:
            for suggestion in str(error).split("; try ")[1].split(" or "):
                assert catalogue.cluster(suggestion).num_devices == int(suggestion.rpartition("x")[2]) > 1
        return
    assert found.num_devices == num
    assert found.chip == catalogue.chip(name)
    assert all(tier.count > 1 for tier in found.tiers)


@given(st.sampled_from(sorted(NODES)), st.integers(1, 12))
def test_nodexn_has_all_chips_of_n_nodes(name: str, num: int) -> None:
    node = NODES[name]
    if num > node.domain and num % node.domain:
        with pytest.raises(BadInput, match=f"try {name}x{num - num % node.domain} or"):
            catalogue.cluster(f"{name}x{num}")
    else:
        assert catalogue.cluster(f"{name}x{num}").num_devices == num * node.num_chips


# --- tiers


def test_the_tier_that_a_group_spans() -> None:
    found = catalogue.cluster("h100x64")
    spans = {num: found.tier_spanning(num) for num in (1, 2, 8, 9, 64)}
    assert {num: tier.link.name if tier else None for num, tier in spans.items()} == {
        1: None,
        2: "nvlink-4",
        8: "nvlink-4",
        9: "ib-ndr",
        64: "ib-ndr",
    }
    with pytest.raises(BadInput, match="65 devices are more than the 64 of h100x64"):
        found.tier_spanning(65)


def test_one_chip_spans_nothing() -> None:
    alone = catalogue.cluster("h100")
    assert (alone.num_devices, alone.fast_domain, alone.tier_spanning(1)) == (1, 1, None)
    with pytest.raises(BadInput):
        alone.tier_spanning(2)


def test_a_cluster_of_ones_own_tiers() -> None:
    tiers = (
        Tier(link=LINKS["nvlink-4"], count=8),
        Tier(link=LINKS["ib-ndr"], count=16),
        Tier(link=LINKS["ib-ndr"], count=4, oversubscription=3),
    )
    found = Cluster(name="mine", chip=CHIPS["h100-sxm"], tiers=tiers)
    assert found.num_devices == 512
    assert tiers[2].bytes_per_s == pytest.approx(50e9 / 3)
    assert found.tier_spanning(128) is tiers[1] and found.tier_spanning(129) is tiers[2]
    with pytest.raises(BadInput, match="oversubscription ≥ 1"):
        Cluster(name="mine", chip=CHIPS["h100-sxm"], tiers=(Tier(link=LINKS["ib-ndr"], count=2, oversubscription=0.5),))

"""Every published format is dequantised bit for bit as the package that writes it does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from armillary.errors import BadModel
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantized.quantization_config import packed_reader
from armillary.model.quantized.stored import Stored
from tests.model.quantized.folders import SCHEMES, compress, decompress, scheme_of

N, K = 48, 128


def read(table: dict[str, Any], tensors: dict[str, torch.Tensor], shape: tuple[int, int] = (N, K)) -> PackedRows:
    reader = packed_reader({"quantization_config": table})
    assert reader is not None
    stored = Stored(has=tensors.__contains__, read=tensors.__getitem__)
    packed = reader(stored, "m", shape)
    assert packed is not None
    assert stored.used == set(tensors), "a tensor was not read"
    return packed


def weight(seed: int = 0) -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


def named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"m.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(name: str) -> None:
    format, args = SCHEMES[name]
    scheme = scheme_of(args)
    tensors = compress(weight(), scheme, format)
    table = {"quant_method": "compressed-tensors", "config_groups": {"group_0": json.loads(scheme.model_dump_json())}}
    packed = read(table, named(tensors))
    expected = decompress(tensors, scheme, format)
    assert torch.equal(packed.dequantised().to(expected.dtype), expected)
    rows = packed.select(torch.tensor([5, 1, 40]))
    assert torch.equal(rows.dequantised().to(expected.dtype), expected[[5, 1, 40]])


@pytest.mark.parametrize("name", SCHEMES)
def test_packed_weights_take_the_memory_of_the_file(name: str) -> None:
    """Rows as wide as in real models; scales in bf16, the least that is published."""
    format, args = SCHEMES[name]
    scheme = scheme_of(args | ({"block_structure": [128, 128]} if "block_structure" in args else {}))
    tensors = compress(torch.randn(256, 1024), scheme, format)
    if tensors["weight_scale"].dtype == torch.float32 and args["strategy"] != "block":
        tensors["weight_scale"] = tensors["weight_scale"].bfloat16()
    table = {"quant_method": "compressed-tensors", "config_groups": {"group_0": json.loads(scheme.model_dump_json())}}
    packed = read(table, named(tensors), (256, 1024))
    assert packed.nbytes <= 1.05 * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.peers
def test_nested_nf4_takes_the_memory_of_the_file() -> None:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(torch.randn(256, 1024), quant_type="nf4", compress_statistics=True)
    tensors = {f"m.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()} | {"m.weight": codes}
    packed = read({"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors, (256, 1024))
    assert packed.nbytes <= 1.05 * sum(tensor.nbytes for tensor in tensors.values())
    assert torch.equal(packed.dequantised(), functional.dequantize_4bit(codes, state))


def test_fp8_blocks_of_deepseek() -> None:
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    codes = weight().to(torch.float8_e4m3fn)
    scale = torch.rand(N // 16, K // 32) + 0.1
    tensors = {"m.weight": codes, "m.weight_scale_inv": scale}
    packed = read({"quant_method": "fp8", "weight_block_size": [16, 32]}, tensors)
    converter = FP8BlockDequantizer(targets=["re:.*m$"], weight_block_size=(16, 32))
    expected = converter.process(dict(tensors))["m.weight"]
    assert torch.equal(packed.dequantised().to(expected.dtype), expected)


def test_awq_as_compressed_tensors_reads_it() -> None:
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    numbers = np.random.default_rng(0)
    tensors = {
        "m.qweight": torch.from_numpy(numbers.integers(-(2**31), 2**31, (K, N // 8), dtype=np.int32)),
        "m.qzeros": torch.from_numpy(numbers.integers(-(2**31), 2**31, (K // 32, N // 8), dtype=np.int32)),
        "m.scales": torch.from_numpy(numbers.random((K // 32, N), dtype=np.float32)).half(),
    }
    table = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    packed = read(table, tensors)
    converted = AutoAWQConverter.from_autoawq_config(table).process(dict(tensors))
    scheme = scheme_of({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False})
    parts = {name.removeprefix("m."): tensor for name, tensor in converted.items()}
    assert torch.equal(packed.dequantised(), decompress(parts, scheme, "pack-quantized"))


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_by_its_definition(bits: int, act_order: bool, checkpoint_format: str) -> None:
    """Written number by number: code k of an output is in word k // per_word, from the low bits up."""
    numbers, group, per_word = np.random.default_rng(bits), 32, 32 // bits
    codes = numbers.integers(0, 1 << bits, (K, N))
    zeros = numbers.integers(0, 1 << bits, (K // group, N))
    scales = torch.from_numpy(numbers.random((K // group, N), dtype=np.float32)).half()
    groups = np.arange(K) // group
    if act_order:
        numbers.shuffle(groups)
    words, zero_words = np.zeros((K // per_word, N), np.uint32), np.zeros((K // group, N // per_word), np.uint32)
    for k in range(K):
        words[k // per_word] |= (codes[k] << (k % per_word * bits)).astype(np.uint32)
    for n in range(N):
        zero_words[:, n // per_word] |= (zeros[:, n] << (n % per_word * bits)).astype(np.uint32)
    if checkpoint_format == "gptq":
        zero_words -= np.uint32({4: 0x11111111, 8: 0x01010101}[bits])
    tensors = {
        "m.qweight": torch.from_numpy(words.view(np.int32)),
        "m.qzeros": torch.from_numpy(zero_words.view(np.int32)),
        "m.scales": scales,
        "m.g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    table = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": checkpoint_format}
    packed = read(table, tensors)
    expected = torch.from_numpy(codes - zeros[groups]).half() * scales[torch.from_numpy(groups)]
    assert torch.equal(packed.dequantised(), expected.t())


def gptq_tensors(bits: int, group: int) -> dict[str, torch.Tensor]:
    """Random codes, zeros and scales, groups in order."""
    numbers = torch.Generator().manual_seed(bits)
    return {
        "m.qweight": torch.randint(-(2**31), 2**31 - 1, (K * bits // 32, N), dtype=torch.int32, generator=numbers),
        "m.qzeros": torch.randint(
            -(2**31), 2**31 - 1, (K // group, N * bits // 32), dtype=torch.int32, generator=numbers
        ),
        "m.scales": torch.rand(K // group, N, generator=numbers).half(),
    }


@pytest.mark.parametrize("exceptions", ["dynamic", "extra_config"])
def test_gptq_modules_of_other_bits_and_groups(exceptions: str) -> None:
    """As gptqmodel (dynamic) and auto-round (extra_config) write them: shapes say which module is an exception."""
    table = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    for bits, group in ((4, 32), (8, 32), (4, 64), (8, 64), (4, K), (8, K)):
        tensors = gptq_tensors(bits, group)
        expected = read(table | {"bits": bits, "group_size": group}, tensors).dequantised()
        assert torch.equal(read(table | {exceptions: {"some": {"bits": 8}}}, tensors).dequantised(), expected)
    with pytest.raises(BadModel, match="has shape"):
        read(table, gptq_tensors(8, 32))


@pytest.mark.parametrize(
    ("packing", "within"),
    [
        ("auto_round:auto_gptq", {"quant_method": "gptq"}),
        ("auto_round:gptqmodel", {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
        ("auto_round", {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
    ],
)
def test_auto_round_is_another_format_within(packing: str, within: dict[str, str]) -> None:
    tensors, table = gptq_tensors(4, 32), {"bits": 4, "group_size": 32}
    found = read(table | {"quant_method": "auto-round", "data_type": "int", "packing_format": packing}, tensors)
    assert torch.equal(found.dequantised(), read(table | within, tensors).dequantised())


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_blocks_as_transformers_writes_them(scale_fmt: str) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config(weight_block_size=(16, 32), scale_fmt=scale_fmt)

    tensors = Fp8Quantize(Quantizer()).convert({"m.weight": weight()})
    packed = read({"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": scale_fmt}, tensors)
    assert tensors["m.weight_scale_inv"].dtype == (torch.float32 if scale_fmt == "float" else torch.float8_e8m0fnu)
    stored = {"weight": [tensors["m.weight"]], "weight_scale_inv": [tensors["m.weight_scale_inv"].float()]}
    assert torch.equal(packed.dequantised(), Fp8Dequantize(Quantizer()).convert(stored)["weight"])
    assert (packed.dequantised() - weight()).norm() < 0.1 * weight().norm()


def test_scales_that_divide() -> None:
    """gptqmodel's weight_scale_inv is the inverse of DeepSeek's."""
    codes, scale = weight().to(torch.float8_e4m3fn), torch.exp2(torch.arange(12.0)).reshape(3, 4)
    table = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    inverse = read(table | {"weight_scale_semantics": "inverse"}, {"m.weight": codes, "m.weight_scale_inv": 1 / scale})
    plain = read(table, {"m.weight": codes, "m.weight_scale_inv": scale})
    assert torch.equal(inverse.dequantised(), plain.dequantised())


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4bit(kind: str, nested: bool) -> None:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight(), quant_type=kind, compress_statistics=nested)
    tensors = {f"m.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    packed = read({"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors | {"m.weight": codes})
    assert torch.equal(packed.dequantised(), functional.dequantize_4bit(codes, state))


@pytest.mark.peers
def test_bitsandbytes_int8() -> None:
    from bitsandbytes import functional

    codes, maximum, _ = functional.int8_vectorwise_quant(weight().half())
    tensors = {"m.weight": codes, "m.SCB": maximum, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}
    packed = read({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors)
    assert torch.equal(packed.dequantised(), functional.int8_vectorwise_dequant(codes, maximum))


def test_wrong_configs_and_tensors_are_one_line() -> None:
    awq = {
        "m.qweight": torch.zeros(K, N // 8, dtype=torch.int32),
        "m.qzeros": torch.zeros(K // 32, N // 8, dtype=torch.int32),
        "m.scales": torch.ones(K // 32, N),
    }
    gptq = awq | {
        "m.qweight": torch.zeros(K // 8, N, dtype=torch.int32),
        "m.g_idx": torch.full((K,), 9, dtype=torch.int32),
    }
    fp8 = {"m.weight": weight().to(torch.float8_e4m3fn), "m.weight_scale_inv": torch.ones(3, 3)}
    table = {"quant_method": "awq", "bits": 4, "group_size": 32}
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        (table | {"group_size": 10**12}, awq, "groups of 1000000000000"),
        (table | {"group_size": 0}, awq, "groups of 0"),
        (table | {"bits": 3}, awq, "not supported"),
        (table, {name: tensor for name, tensor in awq.items() if name != "m.scales"}, "m.scales is missing"),
        (table, awq | {"m.qzeros": torch.zeros(1, 1, dtype=torch.int32)}, "has shape"),
        (table, awq | {"m.scales": torch.ones(K // 32, N, dtype=torch.int64)}, "is int64"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq, "does not assign"),
        ({"quant_method": "fp8", "weight_block_size": [-1, 128]}, fp8, "no blocks"),
        ({"quant_method": "fp8", "weight_block_size": [16, 64]}, fp8, "has shape"),
        ({"quant_method": "magic"}, awq, "not supported"),
        ({"quant_method": "auto-round", "bits": 4}, gptq, "packing_format '' of data_type 'int' is not supported"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:mlx"}, gptq, "'mlx'"),
        ({"quant_method": "auto-round", "bits": 4, "rotation_config": {"a": 1}}, gptq, "rotation_config"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"a": {}}}, gptq, "does not assign"),
        ({"quant_method": "compressed-tensors"}, awq, "config_groups"),
    ]
    for config, tensors, text in cases:
        with pytest.raises(BadModel, match=text) as error:
            read(config, tensors)
        assert "\n" not in str(error.value)

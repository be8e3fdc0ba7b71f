"""Packed weights: names, shapes and types as their formats say, and values that others unpack to nearly the same.

``make test-models`` writes every quantised model, each run of the tests one of each format.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack

from tests.matrix_results import results_folder
from tests.small_models import packing, write_small_model
from tests.small_models.shrink import language_part, quantisation
from tests.small_models.weights import names, published

OUTPUTS, INPUTS, GROUP = 192, 384, 128
QUANTISED = [name for name in names() if quantisation(published(name)) is not None]
IN_EVERY_RUN = (
    "DeepSeek-V3",
    "Hunyuan-7B-Instruct-FP8",
    "Laguna-XS.2-FP8",
    "Meta-Llama-3.1-8B-Instruct-FP8-dynamic",
    "Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
    "Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
    "MiniMax-M2-AWQ",
    "MiniMax-M2.5-NVFP4",
    "Qwen2.5-7B-Instruct-GPTQ-Int4",
    "gpt-oss-20b",
)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(3))


def test_float8_by_block(weight: torch.Tensor) -> None:
    """Each element is within half a step of three bits of what was there; blocks at the edge are smaller."""
    packed = packing.float8_by_block(weight, "weight_scale_inv")
    assert described(packed) == {
        "weight": (torch.float8_e4m3fn, (192, 384)),
        "weight_scale_inv": (torch.float32, (2, 3)),
    }
    scales = packed["weight_scale_inv"].repeat_interleave(128, 0)[:OUTPUTS].repeat_interleave(128, 1)
    unpacked = packed["weight"].float() * scales
    assert torch.all((unpacked - weight).abs() <= weight.abs() / 16 + scales / 512)
    assert packed["weight"].float().abs().max() == packing.FLOAT8_MAX
    powers = packing.float8_by_block(weight, "weight_scale_inv", powers_of_two=True)["weight_scale_inv"]
    assert torch.equal(torch.log2(powers), torch.log2(powers).round())


def test_awq(weight: torch.Tensor) -> None:
    """VLLM's packer of AWQ gives the same int32 for the numbers that are unpacked here."""
    packed = packing.awq(weight, GROUP)
    assert described(packed) == {
        "qweight": (torch.int32, (384, 24)),
        "qzeros": (torch.int32, (3, 24)),
        "scales": (torch.float16, (3, 192)),
    }
    # AutoAWQ's order, read from its kernel: where each of eight columns stands.
    position = [0, 4, 1, 5, 2, 6, 3, 7]
    numbers, zeros = (
        nibbles(packed[part]).reshape(-1, OUTPUTS // 8, 8)[:, :, position].reshape(-1, OUTPUTS)
        for part in ("qweight", "qzeros")
    )
    assert torch.equal(awq_pack(numbers, 4, INPUTS, OUTPUTS), packed["qweight"])
    assert torch.equal(awq_pack(zeros, 4, 3, OUTPUTS), packed["qzeros"])
    scales = packed["scales"].float().repeat_interleave(GROUP, 0)
    unpacked = (numbers - zeros.repeat_interleave(GROUP, 0)) * scales
    assert torch.all((unpacked.t() - weight).abs() <= 1.02 * scales.t())


def test_gptq(weight: torch.Tensor) -> None:
    """VLLM's packer of GPTQ gives the same int32 for the numbers that are unpacked here."""
    packed = packing.gptq(weight, GROUP)
    assert described(packed) == {
        "qweight": (torch.int32, (48, 192)),
        "qzeros": (torch.int32, (3, 24)),
        "scales": (torch.float16, (3, 192)),
        "g_idx": (torch.int32, (384,)),
    }
    numbers = nibbles(packed["qweight"].t().contiguous()).t()
    assert torch.equal(gptq_pack(numbers.contiguous(), 4, INPUTS, OUTPUTS), packed["qweight"])
    assert packed["g_idx"].tolist() == [index // GROUP for index in range(INPUTS)]
    zeros = nibbles(packed["qzeros"]) + 1
    groups = packed["g_idx"].long()
    unpacked = (numbers - zeros[groups]) * packed["scales"].float()[groups]
    assert torch.all((unpacked.t() - weight).abs() <= 0.52 * packed["scales"].float()[groups].t())


def scheme(name: str) -> QuantizationScheme:
    (group,) = published(name)["quantization_config"]["config_groups"].values()
    return QuantizationScheme(**group)


@pytest.mark.parametrize(
    ("name", "library_format", "error"),
    [
        ("Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "pack-quantized", 0.51 / 7.5),
        ("Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "int-quantized", 0.51 / 127),
        ("Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "float-quantized", 1 / 16),
        ("Meta-Llama-3-8B-Instruct-FP8-KV", "float-quantized", 1 / 16),
        ("Laguna-XS.2-FP8", "float-quantized", 1 / 16),
    ],
)
def test_compressed_tensors(name: str, library_format: str, error: float, weight: torch.Tensor) -> None:
    """The compressed-tensors library unpacks the same weights, with the published file's own scheme."""
    weight = torch.cat([weight, weight[:64]])  # the library takes whole blocks only
    quantised = {**published(name)["quantization_config"], "ignore": [], "kv_cache_scheme": None}
    packed = packing.packed({"model.up_proj.weight": weight}, quantised, torch.float32)
    local = {part.rpartition(".")[2]: value for part, value in packed.items()}
    compressor = BaseCompressor.get_value_from_registry(library_format)
    unpacked = compressor.decompress(local, scheme(name))["weight"]
    assert unpacked.shape == weight.shape
    assert torch.all((unpacked.float() - weight).abs() <= error * weight.abs().max() + 1e-6)
    assert (unpacked.float() - weight).abs().mean() < 0.5 * error * weight.abs().max()


def test_mxfp4() -> None:
    """The library's step for such numbers: two in a byte, the first below, and the exponent of each 32."""
    experts = torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(4))
    blocks, exponents = packing.mxfp4(experts)
    assert (blocks.dtype, tuple(blocks.shape)) == (torch.uint8, (2, 64, 3, 16))
    assert (exponents.dtype, tuple(exponents.shape)) == (torch.uint8, (2, 64, 3))
    unpacked = transformers_mxfp4(blocks, exponents)
    largest = experts.reshape(2, 64, 3, 32).abs().amax(-1).repeat_interleave(32, -1)
    assert torch.all((unpacked - experts).abs() <= largest / 3)
    assert (unpacked - experts).abs().mean() < 0.12


def transformers_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Unpack as transformers does for gpt-oss, whose result stands ``[experts, inputs, outputs]``."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32).transpose(1, 2)


def test_nvfp4(weight: torch.Tensor) -> None:
    packed = packing.nvfp4(weight)
    assert described(packed) == {
        "weight": (torch.uint8, (192, 192)),
        "weight_scale": (torch.float8_e4m3fn, (192, 24)),
        "weight_scale_2": (torch.float32, ()),
        "input_scale": (torch.float32, ()),
    }
    number = torch.stack([packed["weight"] & 15, packed["weight"] >> 4], -1).reshape(OUTPUTS, INPUTS).long()
    steps = torch.tensor([*packing.FLOAT4, *(-step for step in packing.FLOAT4)])
    scales = packed["weight_scale"].float().repeat_interleave(16, 1) * packed["weight_scale_2"]
    assert torch.all((steps[number] * scales - weight).abs() <= 1.1 * scales)


@pytest.mark.parametrize("name", IN_EVERY_RUN if results_folder() is None else QUANTISED)
def test_each_quantised_model_is_written(name: str, tmp_path: Path) -> None:
    """Its configuration is as published, its matrices are packed, and what the published one leaves out is not."""
    path = write_small_model(name, tmp_path)
    written = json.loads((path / "config.json").read_text())
    assert quantisation(written) == quantisation(published(name))
    tensors = load_file(path / "model.safetensors")
    matrices = [part for part in PARTS[quantisation(written)["quant_method"]] if any(part in key for key in tensors)]
    assert matrices, sorted(tensors)[:20]
    packed = [key for key, tensor in tensors.items() if tensor.dtype in PACKED]
    layers = language_part(written)["num_hidden_layers"]
    assert {layer_of(key) for key in packed} - {None} == set(range(layers))
    for key in packed:
        assert not any(word in key for word in ("embed", "norm", "lm_head", "router", ".gate.", "conv", "visual")), key
    if quantisation(written).get("kv_cache_scheme"):
        assert sum(key.endswith(".k_scale") for key in tensors) == layers


def test_without_quantisation(tmp_path: Path) -> None:
    """The same configuration but for what says that weights are quantised, in another folder."""
    quantised, plain = (write_small_model("Qwen3-8B-FP8", tmp_path, quantised=each) for each in (True, False))
    assert quantised != plain
    before, after = (json.loads((path / "config.json").read_text()) for path in (quantised, plain))
    del before["quantization_config"]
    assert list(after.items()) == list({**before, "torch_dtype": "float32"}.items())
    assert {tensor.dtype for tensor in load_file(plain / "model.safetensors").values()} == {torch.float32}


PARTS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("weight_scale_inv",),
    "awq": ("qweight",),
    "gptq": ("g_idx",),
    "compressed-tensors": ("weight_scale", "weight_packed"),
    "modelopt": ("weight_scale_2",),
    "mxfp4": ("gate_up_proj_blocks",),
}
PACKED = (torch.float8_e4m3fn, torch.int8, torch.int32, torch.uint8)


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return the eight numbers of each int32, the lowest bits first."""
    unsigned = words.view(torch.uint32).to(torch.int64)
    return ((unsigned[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(-2).to(torch.int32)


def layer_of(key: str) -> int | None:
    numbers = [part for part in key.partition("layers.")[2].split(".") if part]
    return int(numbers[0]) if numbers else None

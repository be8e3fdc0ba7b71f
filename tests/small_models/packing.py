"""Packs weights as the formats of quantised checkpoints say: names, shapes and element types as they are published.

Each packer takes one matrix of ``[outputs, inputs]`` in float32 and returns what stands in the checkpoint in its place,
by the last part of the name. Sources: vLLM's loaders (``model_executor/layers/quantization``), the compressed-tensors
library, AutoAWQ's GEMM layout, AutoGPTQ's first checkpoint format, the OCP microscaling specification.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Packer = Callable[[torch.Tensor], Tensors]

FLOAT8_MAX = 448.0
FLOAT4_MAX = 6.0
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three bits without the sign mean."""
NIBBLES = 8
"""Numbers of four bits in an int32."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns stands where in an int32, the lowest bits first."""
MX_BLOCK, NVFP4_BLOCK = 32, 16
INPUT_SCALE = 0.05
KV_SCALES = {"k_scale": 0.03, "v_scale": 0.02}
PLAIN = re.compile(
    r"embed|norm|lm_head|router|conv|weights_proj|vision|visual|audio|projector|rotary|correction"
    r"|(^|\.)(gate|shared_expert_gate)$"
)
"""Matrices that no published checkpoint quantises: look-up tables, routers, convolutions, towers."""


def packed(tensors: Mapping[str, torch.Tensor], quantisation: Mapping[str, Any], dtype: torch.dtype) -> Tensors:
    """Return the tensors of a quantised checkpoint for those of the same model before quantisation.

    What is not quantised becomes ``dtype``, but numbers of 32 bits that models keep in such stay. Raises
    :class:`NotImplementedError` for a format that this module cannot write.
    """
    if quantisation["quant_method"] == "mxfp4":
        return _packed_experts(tensors, dtype)
    pack = _packer(quantisation, dtype)
    result: Tensors = {}
    for name, tensor in _single_experts(tensors).items():
        module, _, parameter = name.rpartition(".")
        if parameter == "weight" and tensor.dim() == 2 and is_packed(module, quantisation):
            result |= {f"{module}.{part}": value for part, value in pack(tensor.float()).items()}
        else:
            result[name] = tensor if "correction_bias" in name or "A_log" in name else tensor.to(dtype)
    if quantisation.get("kv_cache_scheme"):
        attentions = {name.rpartition(".k_proj.")[0] for name in tensors if ".k_proj." in name}
        result |= {
            f"{module}.{part}": torch.tensor([scale]) for module in attentions for part, scale in KV_SCALES.items()
        }
    return result


def is_packed(module: str, quantisation: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint has the matrix of a module packed.

    >>> is_packed("model.layers.0.mlp.up_proj", {}), is_packed("model.layers.0.mlp.gate", {})
    (True, False)
    >>> is_packed("model.layers.0.self_attn.q_proj", {"ignore": ["re:.*self_attn.*"]})
    False
    """
    left_out = [
        entry
        for field in ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
        for entry in quantisation.get(field) or ()
    ]
    return not PLAIN.search(module) and not any(_names(entry, module) for entry in left_out)


def _names(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return module == entry or module.startswith(f"{entry}.") or fnmatch.fnmatch(module, entry)


def _packer(quantisation: Mapping[str, Any], dtype: torch.dtype) -> Packer:
    match quantisation["quant_method"]:
        case "fp8" if quantisation.get("weight_block_size") == [128, 128]:
            powers = quantisation.get("scale_fmt") == "ue8m0"
            return lambda weight: float8_by_block(weight, "weight_scale_inv", powers)
        case "awq" if quantisation["bits"] == 4 and quantisation["zero_point"]:
            return lambda weight: awq(weight, quantisation["group_size"])
        case "gptq" if quantisation["bits"] == 4 and quantisation["sym"]:
            if quantisation["desc_act"] and not quantisation.get("static_groups"):
                raise NotImplementedError("GPTQ with groups by the order of activations")
            return lambda weight: gptq(weight, quantisation["group_size"])
        case "compressed-tensors":
            return _compressed_tensors(quantisation, dtype)
        case "modelopt" if quantisation.get("quant_algo") == "NVFP4":
            return nvfp4
    raise NotImplementedError(f"quantisation {quantisation}")


def _compressed_tensors(quantisation: Mapping[str, Any], dtype: torch.dtype) -> Packer:
    (group,) = quantisation["config_groups"].values()
    weights, inputs = group["weights"], group["input_activations"]

    def static() -> Tensors:
        return {"input_scale": torch.tensor([INPUT_SCALE])} if inputs and not inputs["dynamic"] else {}

    match weights["type"], weights["num_bits"], weights["strategy"]:
        case "float", 8, "block" if weights["block_structure"] == [128, 128]:
            return lambda weight: float8_by_block(weight, "weight_scale")
        case "float", 8, "tensor" | "channel" as strategy:
            return lambda weight: float8(weight, by_channel=strategy == "channel") | static()
        case "int", 8, "channel":
            return lambda weight: int8(weight) | static()
        case "int", 4, "group" if weights["symmetric"] and weights["actorder"] != "group":
            return lambda weight: int4_by_group(weight, weights["group_size"], dtype)
    raise NotImplementedError(f"compressed-tensors {weights}")


# One matrix


def float8(weight: torch.Tensor, by_channel: bool) -> Tensors:
    """Return ``weight`` as float8 and ``weight_scale``, one for each output or one for all."""
    largest = weight.abs().amax(1, keepdim=True) if by_channel else weight.abs().amax()[None]
    scale = largest.clamp(min=1e-8) / FLOAT8_MAX
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def float8_by_block(weight: torch.Tensor, name: str, powers_of_two: bool = False) -> Tensors:
    """Return ``weight`` as float8 and a scale for each block of 128 x 128, those at the edges being smaller."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.reshape(rows, 128, columns, 128)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-8) / FLOAT8_MAX
    if powers_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    quantised = (blocks / scale[:, None, :, None]).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return {"weight": quantised.to(torch.float8_e4m3fn), name: scale}


def int8(weight: torch.Tensor) -> Tensors:
    """Return ``weight`` as int8 and ``weight_scale`` of each output."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    return {"weight": (weight / scale).round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}


def int4_by_group(weight: torch.Tensor, group_size: int, dtype: torch.dtype) -> Tensors:
    """Return ``weight_packed`` of eight inputs in an int32, ``weight_scale`` of each group, and ``weight_shape``."""
    groups = weight.reshape(weight.shape[0], -1, group_size)
    scale = (groups.abs().amax(2) / 7.5).clamp(min=1e-8).to(dtype)
    numbers = (groups / scale.float()[:, :, None]).round().clamp(-8, 7).to(torch.int32) + 8
    return {
        "weight_packed": _in_int32(numbers.reshape(weight.shape)),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def awq(weight: torch.Tensor, group_size: int) -> Tensors:
    """Return ``qweight`` ``[inputs, outputs / 8]``, and ``qzeros`` and ``scales`` of each group of inputs."""
    groups = weight.t().reshape(-1, group_size, weight.shape[0])
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-5).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    numbers = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    order = [index + 8 * word for word in range(weight.shape[0] // NIBBLES) for index in AWQ_ORDER]
    return {
        "qweight": _in_int32(numbers.reshape(-1, weight.shape[0])[:, order]),
        "qzeros": _in_int32(zeros[:, order]),
        "scales": scales,
    }


def gptq(weight: torch.Tensor, group_size: int) -> Tensors:
    """Return ``qweight`` ``[inputs / 8, outputs]``, ``qzeros``, ``scales`` and each input's group in ``g_idx``.

    This first format stores a zero point minus one: that of symmetric weights is 8, stored as 7.
    """
    inputs, outputs = weight.shape[1], weight.shape[0]
    groups = weight.t().reshape(-1, group_size, outputs)
    scales = (groups.abs().amax(1) / 7.5).clamp(min=1e-5).half()
    numbers = (groups / scales.float()[:, None]).round().clamp(-8, 7) + 8
    return {
        "qweight": _in_int32(numbers.reshape(inputs, outputs).t()).t().contiguous(),
        "qzeros": _in_int32(torch.full((inputs // group_size, outputs), 7)),
        "scales": scales,
        "g_idx": torch.arange(inputs, dtype=torch.int32) // group_size,
    }


def nvfp4(weight: torch.Tensor) -> Tensors:
    """Return ``weight`` of two numbers in a byte, a float8 scale for 16 inputs, one for all, and one of the inputs."""
    overall = weight.abs().amax().clamp(min=1e-8) / (FLOAT4_MAX * FLOAT8_MAX)
    blocks = weight.reshape(weight.shape[0], -1, NVFP4_BLOCK)
    scale = (blocks.abs().amax(2) / FLOAT4_MAX / overall).clamp(min=2.0**-6).to(torch.float8_e4m3fn)
    numbers = _float4(blocks / (scale.float() * overall)[:, :, None])
    return {
        "weight": _in_bytes(numbers.reshape(weight.shape)),
        "weight_scale": scale,
        "weight_scale_2": overall,
        "input_scale": torch.tensor(INPUT_SCALE),
    }


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes ``[..., inputs / 32, 16]`` and the exponents ``[..., inputs / 32]`` of a stack of matrices."""
    blocks = weight.reshape(*weight.shape[:-1], -1, MX_BLOCK)
    exponents = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-100) / FLOAT4_MAX))
    numbers = _float4(blocks / torch.exp2(exponents)[..., None])
    return _in_bytes(numbers), (exponents + 127).to(torch.uint8)


def _in_int32(numbers: torch.Tensor) -> torch.Tensor:
    """Put eight neighbours of four bits into an int32, the first in the lowest bits."""
    words = numbers.to(torch.int64).reshape(*numbers.shape[:-1], -1, NIBBLES)
    shifts = torch.arange(0, 32, 4)
    return (words << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def _in_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Put two neighbours of four bits into a byte, the first in the lower bits."""
    return numbers[..., 0::2] | (numbers[..., 1::2] << 4)


def _float4(values: torch.Tensor) -> torch.Tensor:
    """Return the four bits of the nearest number, the sign above."""
    steps = torch.tensor(FLOAT4)
    magnitude = torch.bucketize(values.abs().contiguous(), (steps[1:] + steps[:-1]) / 2)
    return (magnitude + 8 * (values < 0)).to(torch.uint8)


# Experts


def _packed_experts(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Tensors:
    """Pack the stacked experts of gpt-oss, whose matrices stand ``[experts, inputs, outputs]`` before."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            result[f"{name}_blocks"], result[f"{name}_scales"] = mxfp4(tensor.float().transpose(1, 2))
        else:
            result[name] = tensor.to(dtype)
    return result


def _single_experts(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Take stacks of experts apart, as quantised checkpoints have them (Llama 4)."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        stack, _, kind = name.rpartition(".")
        if not stack.endswith(".experts") or tensor.dim() != 3:
            result[name] = tensor
            continue
        for expert, matrix in enumerate(tensor.transpose(1, 2)):
            gate_and_up = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            parts = gate_and_up if kind == "gate_up_proj" else [(kind, matrix)]
            result |= {f"{stack}.{expert}.{part}.weight": value.contiguous() for part, value in parts}
    return result

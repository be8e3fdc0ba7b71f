"""The files of a small model."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
}
TENSORS = {"embed": 70_000, "norm": 64, **{f"layers.{index}.qkv": 40_000 for index in range(4)}}


def write_model(folder: Path) -> Path:
    """Make a model's folder, with weights that are the same in each."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_weights(folder / "model.safetensors", TENSORS)
    (folder / "preprocessor_config.json").write_text('{"size": 224}')
    (folder / "modeling_own.py").write_text("SCALE = 1\n")
    (folder / "README.md").write_text("A model.\n")
    return folder


def write_weights(path: Path, lengths: dict[str, int], changed: str = "") -> None:
    """Write a safetensors file of tensors of so many numbers; all numbers of the ``changed`` one are others."""
    header, data = {}, b""
    for name, length in lengths.items():
        numbers = np.random.default_rng([*name.encode(), name == changed]).standard_normal(length, np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": [length], "data_offsets": [len(data), len(data) + len(numbers)]}
        data += numbers
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)

"""A LoRA adapter of random weights for a tiny model."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ADAPTER_RANK = 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""Keys and values too: a prompt's cache is another one under the adapter."""


def make_adapter(model: Path, folder: Path, seed: int = 0) -> Path:
    """Write an adapter of the attention of ``model`` into ``folder``, unless the folder exists; return the folder."""
    if folder.exists():
        return folder
    config = json.loads((model / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads = {"q_proj": config["num_attention_heads"]}
    generator, weights = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for projection in PROJECTIONS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            width = heads.get(projection, config["num_key_value_heads"]) * head_dim
            for part, shape in (("A", (ADAPTER_RANK, hidden)), ("B", (width, ADAPTER_RANK))):
                weight = generator.normal(scale=shape[1] ** -0.5, size=shape)
                weights[f"{name}.lora_{part}.weight"] = weight.astype(np.float32)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": list(PROJECTIONS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder

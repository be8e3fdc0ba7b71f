"""Writes small models: the published configuration made small, and random weights in the published format."""

import copy
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvferry.harness.tiny_models import write_atomically

from .packing import packed
from .shrink import language_part, quantisation, shrink
from .step import step_shapes

if TYPE_CHECKING:
    import torch

CONFIGS = Path(__file__).parent.parent / "model_configs"
RECIPE = 4
"""Part of the files' path. Add one when other files are written for the same configuration."""
SAME_CLASS: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Types of models whose class comes with the weights, and the type in transformers that is the same."""

STEP = ("step3_vl", "step3p5")
TOWERS_LEFT_OUT: Mapping[str, str] = {"gemma3n": "Gemma3nForCausalLM"}
"""Types whose towers transformers cannot build without more packages (timm), and the class of the language model."""
QUERY_SIZE = 3.0
EMBEDDED_SIZE = 0.02
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embeddings?|wte|word_embeddings)\.weight$")
QUERY_NORM = re.compile(r"\.(q_norm|q_layernorm|query_layernorm)\.weight$")
QUERY = re.compile(r"\.(q_proj|q_b_proj)\.weight$")


def names() -> list[str]:
    """Return the names of the published configurations."""
    return sorted(path.stem for path in CONFIGS.glob("*.json") if path.stem != "sources")


def published(name: str) -> dict[str, Any]:
    """Return a published configuration."""
    return dict(json.loads((CONFIGS / f"{name}.json").read_text()))


def write_small_model(
    name: str, folder: Path, dtype: Literal["float32", "bfloat16"] = "float32", *, quantised: bool = True
) -> Path:
    """Write the small model of the published configuration ``name`` below ``folder``, unless it exists.

    Returns its path.

    ``config.json`` has the fields of :func:`shrink`, with ``dtype`` as the type of the weights where they are not
    quantised. Without ``quantised`` none are, and the configuration does not say that they are: for engines that lack a
    kernel for the format.

    The path has a digest of all that determines the weights. Several processes may call this function at once. Raises
    :class:`NotImplementedError` for a model whose checkpoint this function cannot write. Needs ``transformers``.
    """
    config = shrink(published(name))
    kind = ""
    if quantisation(config) is not None and not quantised:
        kind = "-unquantised"
        for part in (config, language_part(config)):
            part.pop("quantization_config", None)
    if quantisation(config) is None:
        _set_dtype(config, dtype)
    recipe = json.dumps([RECIPE, dtype, config], sort_keys=True)
    path = folder / f"{name}{kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda draft: _save(config, dtype, draft))
    return path


def _set_dtype(part: dict[str, Any], dtype: str) -> None:
    for name, value in part.items():
        if name in ("dtype", "torch_dtype") and value is not None:
            part[name] = dtype
        elif isinstance(value, dict):
            _set_dtype(value, dtype)


def _save(config: Mapping[str, Any], dtype: str, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    found = quantisation(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tensors = checkpoint(config, "float32" if found else dtype)
    if found:
        own = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        tensors = packed(tensors, found, own)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def checkpoint(config: Mapping[str, Any], dtype: str) -> "dict[str, torch.Tensor]":
    """Return random weights under their published names, before quantisation."""
    import torch
    from safetensors.torch import load_file
    from transformers.utils import logging

    if config["model_type"] in STEP:
        zero_centered = config.get("zero_centered", False)  # its norms add 1
        tensors = {
            name: torch.full(shape, 0.0 if zero_centered or "bias" in name else 1.0)
            if len(shape) == 1
            else torch.randn(shape) * 0.02
            for name, shape in step_shapes(config).items()
        }
        spread_weights(tensors.items(), language_part(config))
        return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    hide_progress: Any = logging.disable_progress_bar
    hide_progress()
    plain = copy.deepcopy(dict(config))
    if without_towers := plain["model_type"] in TOWERS_LEFT_OUT:
        plain = plain["text_config"] | {"architectures": [TOWERS_LEFT_OUT[plain["model_type"]]]}
    network = make_network(plain, dtype)
    spread_weights(network.named_parameters(), language_part(config))
    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(folder)  # under the names of published checkpoints, not those of its modules
        (file,) = Path(folder).glob("*.safetensors")
        tensors = load_file(file)
    if without_towers:
        return {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    return tensors


def make_network(plain: dict[str, Any], dtype: str) -> Any:
    """Return transformers' model of a configuration, before quantisation."""
    import torch
    import transformers

    for part in (plain, *(value for value in plain.values() if isinstance(value, dict))):
        part.pop("quantization_config", None)
        part.pop("auto_map", None)
        if isinstance(part.get("layer_types"), list):  # those of layers that predict more tokens are not written
            part["layer_types"] = part["layer_types"][: part.get("num_hidden_layers")]
    model_type = plain.pop("model_type")
    model_type = SAME_CLASS.get(model_type, model_type)
    if model_type not in transformers.CONFIG_MAPPING:
        raise NotImplementedError(f"transformers has no class for {model_type!r}")
    known: Callable[..., Any] = transformers.CONFIG_MAPPING[model_type]
    config = known(**plain)
    text = config.get_text_config()
    if model_type.startswith("hunyuan") and text.head_dim is None:  # its attention does not fill it in
        text.head_dim = text.hidden_size // text.num_attention_heads
    return getattr(transformers, plain["architectures"][0])._from_config(config, dtype=getattr(torch, dtype))


def spread_weights(parameters: "Iterable[tuple[str, torch.Tensor]]", part: Mapping[str, Any]) -> None:
    """Enlarge the weights: with the small defaults the logits hardly depend on the context.

    ``part`` is the configuration of the language model. A matrix, or a stack of experts' matrices, keeps the size of
    what it multiplies. Queries become larger, so that each token attends to some tokens more than to others instead of
    to the mean of all. What is embedded is small: else, with embeddings that also give the logits, the most likely
    token would be the one just read.
    """
    import torch

    queries = QUERY_SIZE
    if "attention_multiplier" in part:  # Granite's is that of a larger head
        head = part.get("head_dim") or part["hidden_size"] // part["num_attention_heads"]
        queries *= head**-0.5 / part["attention_multiplier"]
    multiplier = part["hidden_size"] ** 0.5 if part.get("model_type", "").startswith("gemma") else 1.0
    embedded = EMBEDDED_SIZE / part.get("embedding_multiplier", multiplier)
    with torch.no_grad():
        for name, weight in parameters:
            if EMBEDDING.search(name):
                torch.nn.init.normal_(weight, std=embedded)
            elif "embed" not in name and "conv" not in name and weight.dim() in (2, 3):
                inputs = weight.shape[1] if weight.dim() == 2 else min(weight.shape[1:])
                torch.nn.init.normal_(weight, std=inputs**-0.5)
            if QUERY_NORM.search(name):
                weight.fill_(queries if weight.ne(0).any() else queries - 1)  # Gemma's norms add 1
            elif QUERY.search(name):
                weight.mul_(queries)

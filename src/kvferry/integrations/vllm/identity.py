"""What an engine serves: what its models are, recorded once before vLLM builds any of them, and their weights.

vLLM's model classes change the configuration while they are built, in the workers only: ``deepseek_v2.py`` renames the
scaling of positions, ``falcon_h1.py`` adds a field, layers of attention choose the type of the cache. So the scheduler
and its workers would read other values from one object, and an engine whose worker shares the scheduler's process
other values than one with processes of workers. The record is made in the process that makes the engine's
configuration, and travels to all others inside it.

Weights have a digest of samples of every tensor in the model's files: to read all would take as long as to load them
again. Fine-tuning, a merged adapter and another quantisation change whole tensors, so each tensor is sampled, and a
small one is read whole. The digest misses a change of a few numbers between two samples.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvferry.errors import Reason, SettingsError
from kvferry.handoff.messages import Identity

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from kvferry.integrations.vllm.settings import Settings

_VOLATILE_CONFIG_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")
"""What a copy or another library changes in a model's configuration."""
_RECORD = "_kvferry_record"
LLAMA4_LONG_TOKENS = 32768
"""Llama 4 scales queries by position where ``--max-model-len`` is greater, unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """What the configuration of one model of an engine says.

    ``config`` is a digest of the model's Hugging Face configuration with the operator's changes. ``positions`` says
    which of two scalings by position an engine's other options have chosen; empty for a model that has one.
    ``kv_dtype`` names the element types of the caches: keys and values, and states where the model has any.
    """

    config: str
    positions: str
    architectures: tuple[str, ...]
    quantization: str
    compute_dtype: str
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int


def record_models(vllm_config: "VllmConfig") -> None:
    """Record the engine's model and its drafter, each once: a model that has a record may have been built since."""
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for model in (vllm_config.model_config, drafter):
        if model is not None and _RECORD not in vars(model):
            vars(model)[_RECORD] = _record(vllm_config, model)


def recorded(model: "ModelConfig") -> RecordedModel:
    """Return the record of one of an engine's models. Raises :class:`SettingsError` (unsupported) without one."""
    found: RecordedModel | None = vars(model).get(_RECORD)
    if found is None:
        raise SettingsError(
            Reason.UNSUPPORTED,
            f"the model {model.model} was not recorded when vLLM made the engine's configuration: vLLM had not loaded "
            "kvferry by then.",
            "Let vLLM load kvferry's plugin: leave VLLM_PLUGINS unset, or name kvferry in it.",
        )
    return found


def dtype_name(dtype: object) -> str:
    """Return the name of an element type without its library.

    >>> dtype_name("torch.bfloat16"), dtype_name("fp8_e5m2")
    ('bfloat16', 'fp8_e5m2')
    """
    return str(dtype).removeprefix("torch.")


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _record(vllm_config: "VllmConfig", model: "ModelConfig") -> RecordedModel:
    kept = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE_CONFIG_KEYS}
    return RecordedModel(
        config=digest(json.dumps(kept, sort_keys=True, default=str)),
        positions=_positions(model),
        architectures=tuple(model.architectures or ["unknown"]),
        quantization=_quantization(model),
        compute_dtype=dtype_name(model.dtype),
        kv_dtype=_kv_dtype(vllm_config, model),
        num_layers=int(model.hf_text_config.num_hidden_layers),
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
    )


def _positions(model: "ModelConfig") -> str:
    """Return which of two scalings the options have chosen: of the tables of LongRoPE, or of Llama 4's queries."""
    text, limit = model.hf_text_config, 0
    if text.model_type == "llama4_text":
        # As llama4.py: the configuration of generation and its overrides come before the length.
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        tunes = generation.get("attn_temperature_tuning", model.max_model_len > LLAMA4_LONG_TOKENS)
        return f", attn-temperature-tuning {'on' if tunes else 'off'}"
    found = getattr(text, "rope_parameters", None) or {}
    # One object, or one for each kind of layer.
    for rope in [value for value in found.values() if isinstance(value, Mapping)] or [found]:
        if rope.get("rope_type") == "longrope":
            limit = int(rope.get("original_max_position_embeddings") or text.original_max_position_embeddings)
    if not limit:
        return ""
    return f", max-model-len {'above' if model.max_model_len > limit else 'up to'} {limit}"


def _kv_dtype(vllm_config: "VllmConfig", model: "ModelConfig") -> str:
    cache = vllm_config.cache_config
    names: list[str] = [cache.cache_dtype]
    if model.is_hybrid or model.is_attention_free:
        names += [cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype]
    dtypes = (model.dtype if name == "auto" else name for name in names)
    return "/".join(map(dtype_name, dtypes))


def _quantization(model: "ModelConfig") -> str:
    """Return how the weights are quantised: in the checkpoint, or while they are loaded, which no file records.

    A checkpoint's method is left out: the kernel that runs it, such as ``gptq`` or ``gptq_marlin``, depends on the
    machine.
    """
    is_in_checkpoint = model.model_arch_config.quantization_config is not None
    method = "checkpoint" if is_in_checkpoint else model.quantization or "none"
    details = model.quantization_config
    return method if details is None else f"{method}/{digest(repr(details))}"


def identity_of(vllm_config: "VllmConfig", settings: "Settings") -> Identity:
    """Return the identity on which a peer must agree.

    All but ``weights`` is from the record that the engine's configuration carries. Each process reads the weights
    itself, since ranks may run on hosts with other files; the scheduler compares what its ranks have read. Raises as
    :func:`recorded`.
    """
    model = vllm_config.model_config
    record = recorded(model)
    # Of a model in an object store this host has a folder without weights, with a name of its own.
    place = str(model.model_weights or model.model)
    return Identity(
        model=(settings.model_id or record.config) + record.positions,
        weights=settings.model_id or weights_of(place.rstrip("/"), model.revision).digest,
        quantization=settings.model_id or record.quantization,
        compute_dtype=record.compute_dtype,
        architecture=record.architectures[0],
        kv_dtype=record.kv_dtype,
        num_layers=record.num_layers,
        num_kv_heads=record.num_kv_heads,
        head_size=record.head_size,
    )


SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLE_BYTES = 4096
MAX_SAMPLES = 16384
"""Of all files together, unless there are more tensors: bounds the time to a second where the files are in memory."""
MAX_SAMPLES_PER_SPAN = 8
SPANS_PER_FILE = 1024
"""A file of another format than safetensors is sampled in as many equal parts."""

Span = tuple[int, int]
"""The first byte and the length of a tensor, or of a part of a file."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A digest. Without ``are_known`` the digest is of a name alone: equal digests do not mean equal weights."""

    digest: str
    are_known: bool


def weights_of(model: str, revision: str | None = None, cache: str | None = None) -> Weights:
    """Return the digest of a local folder or file, or of a hub's model at this revision.

    A hub's model is named by its commit, which stands for its files. ``cache`` is the folder of the hub's models on
    this machine where it is not the default.
    """
    place = Path(model)
    if place.exists():
        files = _weight_files(place)
        return Weights(digest_of_files(files), are_known=bool(files))
    snapshot = snapshot_of(model, "config.json", revision, cache)
    commit = None if snapshot is None else snapshot.name
    named = f"{model}@{commit or revision or 'default'}"
    return Weights(digest(named), are_known=commit is not None)


def are_known(model: str, revision: str | None = None, cache: str | None = None) -> bool:
    """Return whether :func:`weights_of` would know the weights, without reading them."""
    place = Path(model)
    if place.exists():
        return bool(_weight_files(place))
    return snapshot_of(model, "config.json", revision, cache) is not None


def _weight_files(place: Path) -> list[Path]:
    return sorted(path for path in files_of(place) if path.suffix in SUFFIXES)


def files_of(place: Path) -> list[Path]:
    """Return the files of a local model: those in its folder, or the one file that it is; none for a hub's model."""
    if place.is_dir():
        return [path for path in sorted(place.iterdir()) if path.is_file()]
    return [place] if place.is_file() else []


def snapshot_of(model: str, config: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Return the folder of a hub's model at this revision in this machine's cache; None where the cache has none.

    ``config`` is a file that each such model has. The folder has the name of the commit.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(model, config, cache_dir=cache, revision=revision)
    except ValueError:
        return None  # not a name of a model on the hub
    return Path(path).parent if isinstance(path, str) else None


def digest_of_files(files: Sequence[Path]) -> str:
    """Return a digest of these files of weights, in their order: names, sizes, headers and samples of each tensor."""
    whole = hashlib.blake2b(digest_size=16)
    spans = []
    for path in files:
        with path.open("rb") as file:
            header, found = _spans(file, path.stat().st_size)
        spans.append(found)
        whole.update(json.dumps([path.name, path.stat().st_size, hashlib.sha256(header).hexdigest()]).encode())
    num_samples = min(max(MAX_SAMPLES // max(sum(map(len, spans)), 1), 1), MAX_SAMPLES_PER_SPAN)
    for path, found in zip(files, spans, strict=True):
        with path.open("rb", buffering=0) as file:
            for begin, length in (sample for span in found for sample in _samples(span, num_samples)):
                file.seek(begin)
                whole.update(file.read(length))
    return whole.hexdigest()


def _spans(file: BinaryIO, size: int) -> tuple[bytes, list[Span]]:
    """Return the header of a file, which names the tensors, and where they lie; the header is empty where unknown."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size - 8:
            raise ValueError
        header = file.read(length)
        tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
        first = 8 + length
        offsets = [tensor["data_offsets"] for tensor in tensors.values()]
        return header, sorted((first + begin, end - begin) for begin, end in offsets)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        each = -(-size // SPANS_PER_FILE)
        return b"", [(begin, min(each, size - begin)) for begin in range(0, size, each or 1)]


def _samples(span: Span, count: int) -> Iterator[Span]:
    """Yield ``count`` samples, from the first byte to the last; one sample alone is from the middle."""
    begin, length = span
    if length <= count * SAMPLE_BYTES:
        yield span
        return
    room = length - SAMPLE_BYTES
    places = [room // 2] if count == 1 else [room * index // (count - 1) for index in range(count)]
    yield from ((begin + place, SAMPLE_BYTES) for place in places)

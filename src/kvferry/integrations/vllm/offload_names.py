"""The names of stored blocks: a namespace of all that changes what a block's bytes mean, and the keys in it.

vLLM's hash of a block covers the tokens up to the block's end, and the request's adapter, images, prompt embeddings and
cache salt; neither the model nor the arrangement of bytes. The namespace is a digest of these two, and of every
doubtful fact too: a needless difference is a miss, a missing one gives wrong tokens. It has neither the tensor-parallel
nor the pipeline-parallel size, since a slab depends on neither (see :mod:`kvferry.layout.slab`); the slab of one rank
alone has the rank in its shard, and so a namespace of its own.
"""

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.errors import KVFerryError, Reason, SettingsError
from kvferry.integrations.vllm.identity import are_known, dtype_name, files_of, recorded, weights_of
from kvferry.integrations.vllm.versions import installed_version, known_values
from kvferry.layout.shard import CacheGroup, Shard
from kvferry.tiers.protocol import KEY_BYTES

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

FORMAT = 1
"""Of stored blocks. A change of what is stored under a name must raise this number."""
NAMESPACE_BYTES, GROUP_BYTES = 14, 2
HASH_BYTES = KEY_BYTES - NAMESPACE_BYTES - GROUP_BYTES
"""Room for a hash of vLLM's; a shorter one, such as xxhash's, is followed by zeros."""
# Small files that change what a model computes and are neither weights nor part of the configuration: its own code, how
# images become pixels, how weights are quantised.
_MODEL_FILES = ("*.py", "*processor*.json", "*quant*.json")
# How vLLM loads the files of the model's own folder. Others make weights up, or fetch them from somewhere else.
_FORMATS_OF_FILES = (
    "auto",
    "hf",
    "safetensors",
    "pt",
    "npcache",
    "mistral",
    "sharded_state",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "runai_streamer_sharded",
)
# Fields of vLLM's configurations that change no byte of a block: sizes, places, kernels. All others are in the name.
_SIZES_OF_MULTIMODAL = frozenset(
    {
        "limit_per_prompt",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_encoder_tp_mode",
        "mm_encoder_attn_backend",
        "mm_encoder_fp8_scale_save_path",
        "skip_mm_profiling",
        "mm_tensor_ipc",
        "mm_ipc_gpu_memory_gb",
    }
)
_SIZES_OF_ADAPTERS = frozenset(
    {"max_lora_rank", "max_loras", "max_cpu_loras", "fully_sharded_loras", "specialize_active_lora"}
)
_NUMBERS_OF_ATTENTION = (
    "use_non_causal",
    "indexer_kv_dtype",
    "indexer_sparse_logits",
    "use_prefill_query_quantization",
    "disable_flashinfer_q_quantization",
)
_FIELDS_OF_STATES = ("mamba_cache_mode", "use_replayssm", "replayssm_buffer_len", "use_kda_recoverssm")
# Variables that make up weights or routes, round numbers more, or arrange a cache otherwise than its shape says.
VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_USE_MODELSCOPE",
)


@dataclass(frozen=True, slots=True)
class BlockNames:
    """A namespace and the facts of which it is the digest, ready for JSON.

    ``private`` says why only this process can use the names: unrepeatable-hashes or unknown-weights; None where other
    processes and later ones can. ``hash_bytes`` is the length of vLLM's hashes. ``is_certain`` says whether the engine
    still has the weights that the names mean; None where nothing changes them unheard.
    """

    namespace: bytes
    facts: Mapping[str, Any]
    private: KVFerryError | None = None
    hash_bytes: int = HASH_BYTES
    is_certain: Callable[[], bool] | None = None

    def keys(self, group: int, block_hashes: Iterable[bytes]) -> list[bytes]:
        """Return the keys of blocks: of the cache group with this index, and of the tokens with these hashes of vLLM's.

        >>> [key] = BlockNames(bytes(14), {}, hash_bytes=3).keys(1, [bytes.fromhex("c0ffee")])
        >>> len(key), key[14:20].hex()
        (48, '0001c0ffee00')
        """
        before, behind = self.namespace + group.to_bytes(GROUP_BYTES, "big"), bytes(HASH_BYTES - self.hash_bytes)
        return [before + block_hash + behind for block_hash in block_hashes]

    def renewed(self) -> "BlockNames":
        """Return names of which no other process knows, for an engine whose weights may have been changed in place."""
        private = self.private or SettingsError(
            Reason.UNKNOWN_WEIGHTS, "the engine's caches were reset: its weights may have changed since they were read."
        )
        return replace(self, namespace=secrets.token_bytes(NAMESPACE_BYTES), private=private)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What changes the meaning of stored bytes, but for the slab, which is known only when all ranks have reported."""

    facts: Mapping[str, Any]
    private: KVFerryError | None
    hash_bytes: int

    def names(self, slab: Shard) -> BlockNames:
        """Return the names for the blocks of this slab."""
        # A copy without Python's types, which is what a reader of the JSON sees.
        encoded = json.dumps({**self.facts, "slab": _slab(slab)}, sort_keys=True, default=str)
        return BlockNames(namespace_of(encoded), json.loads(encoded), self.private, self.hash_bytes)


def engine_facts(vllm_config: "VllmConfig", tokens_per_hash: int, model_id: str) -> EngineFacts:
    """Return the facts of an engine; reads samples of the weights' files.

    ``tokens_per_hash`` is vLLM's hash block size. A ``model_id`` stands for the weights, of the drafter too. The names
    are for requests without an adapter; see :mod:`~kvferry.integrations.vllm.adapters`.
    """
    from vllm import envs

    seed, hash_bytes = check_hashes(vllm_config)
    hashes = {"algorithm": vllm_config.cache_config.prefix_caching_hash_algo, "seed": seed, "tokens": tokens_per_hash}
    drafting = vllm_config.speculative_config
    models: dict[str, Any] = _models(vllm_config)
    for role, model in models.items():
        if model is not None:
            models[role] = _model(vllm_config, model, model_id or _digest_of_weights(vllm_config, model))
    if drafting is not None and models["drafter"] is not None:
        models["drafter"]["method"] = drafting.method
    facts = {
        "format": FORMAT,
        "vllm": ".".join(installed_version().split(".")[:2]),
        **models,
        "adapters": _all_but(_SIZES_OF_ADAPTERS, vllm_config.lora_config),
        "cache": _cache(vllm_config),
        "attention": known_values(vllm_config.attention_config, _NUMBERS_OF_ATTENTION),
        "variables": known_values(envs, VARIABLES),
        "platform_options": vllm_config.additional_config,
        "hashes": hashes,
    }
    return EngineFacts(facts, why_private(vllm_config, model_id), hash_bytes)


def why_private(vllm_config: "VllmConfig", model_id: str) -> KVFerryError | None:
    """Return why other processes could not use this engine's names of blocks; None where they can. Reads no weights."""
    private = _random_hashes(vllm_config) or _unhashed_images(vllm_config)
    for model in () if model_id else _models(vllm_config).values():
        if model is not None and not _are_known(vllm_config, model):
            private = private or unknown_weights(str(model.model))
    return private


def _models(vllm_config: "VllmConfig") -> dict[str, "ModelConfig | None"]:
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return {"model": vllm_config.model_config, "drafter": drafter}


def namespace_of(facts: str) -> bytes:
    """Return the namespace of these facts, encoded as JSON."""
    return hashlib.blake2b(facts.encode(), digest_size=NAMESPACE_BYTES).digest()


def _model(vllm_config: "VllmConfig", model: "ModelConfig", weights: str) -> dict[str, Any]:
    """Return what says how this model computes keys, values and states."""
    load, record = vllm_config.load_config, recorded(model)
    return {
        "architectures": record.architectures,
        "config": record.config + record.positions,
        "weights": weights,
        "files": _digest_of_files(Path(str(model.model))),
        "code_revision": model.code_revision,
        "class_overrides": model.model_class_overrides,
        "implementation": str(model.model_impl),
        "quantization": record.quantization,
        "dtype": record.compute_dtype,
        # Some models scale their positions or their attention by it: Phi-3's long RoPE, Llama 4.
        "max_model_len": model.max_model_len,
        "disable_sliding_window": model.disable_sliding_window,
        "load": [str(load.load_format), str(load.model_loader_extra_config), str(load.ignore_patterns)],
        "multimodal": _multimodal(model),
    }


def _multimodal(model: "ModelConfig") -> dict[str, Any] | None:
    """Return how images become embeddings; the file of an encoder's scales by its content."""
    found = _all_but(_SIZES_OF_MULTIMODAL, model.multimodal_config)
    if found is not None and (path := found.pop("mm_encoder_fp8_scale_path")) is not None:
        found["encoder_scales"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


def _all_but(left_out: frozenset[str], config: Any) -> dict[str, Any] | None:
    """Return the fields of one of vLLM's configurations, new ones too."""
    if config is None:
        return None
    names = [field.name for field in dataclasses.fields(config) if field.name not in left_out]
    return {name: getattr(config, name) for name in names}


def _cache(vllm_config: "VllmConfig") -> dict[str, Any]:
    """Return what numbers the bytes are; :func:`_slab` says where each of them lies."""
    from vllm.platforms import current_platform

    cache, kv_dtype = vllm_config.cache_config, recorded(vllm_config.model_config).kv_dtype
    # An "fp8" of some GPUs has another bias than that of others.
    fp8 = dtype_name(current_platform.fp8_dtype()) if "fp8" in kv_dtype else None
    states = None
    if vllm_config.model_config.is_hybrid or vllm_config.model_config.is_attention_free:
        rounding = vllm_config.mamba_config.enable_stochastic_rounding
        states = {name: getattr(cache, name) for name in _FIELDS_OF_STATES} | {"stochastic_rounding": rounding}
    return {
        "dtype": kv_dtype,
        "fp8": fp8,
        "unquantised_layers": sorted(cache.kv_cache_dtype_skip_layers),
        "states": states,
    }


def _unhashed_images(vllm_config: "VllmConfig") -> KVFerryError | None:
    """Return why images are named by no content: with both caches off vLLM counts them, from 1 in each process."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None or multimodal.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching:
        return None
    return SettingsError(
        Reason.UNREPEATABLE_HASHES,
        "prefix caching is off and mm_processor_cache_gb is 0: vLLM then numbers images instead of hashing them, and "
        "other images have the same numbers after a restart.",
        "Run with --enable-prefix-caching, or with --mm-processor-cache-gb above 0.",
    )


def _random_hashes(vllm_config: "VllmConfig") -> KVFerryError | None:
    """Return why vLLM's hashes differ between processes; None where they are the same in all."""
    seed, _ = check_hashes(vllm_config)
    if seed == check_hashes(vllm_config)[0]:
        return None
    return SettingsError(
        Reason.UNREPEATABLE_HASHES,
        f"prefix_caching_hash_algo is {vllm_config.cache_config.prefix_caching_hash_algo!r}, which vLLM seeds at random"
        " in each process.",
        "Run with --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED to the same number everywhere.",
    )


def check_hashes(vllm_config: "VllmConfig") -> tuple[Any, int]:
    """Return the seed of vLLM's hashes, and their length.

    Raises :class:`SettingsError` (unsupported) for hashes too long for a key.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    function = get_hash_fn_by_name(algorithm)
    # vLLM keeps the seed itself only once the scheduler and its connector exist.
    seed = resolve_none_hash_seed(function)
    hash_bytes = len(function(seed))
    if hash_bytes > HASH_BYTES:
        raise SettingsError(
            Reason.UNSUPPORTED,
            f"prefix_caching_hash_algo {algorithm!r} makes hashes of {hash_bytes} bytes; a key has {HASH_BYTES}.",
            "Run with --prefix-caching-hash-algo sha256_cbor.",
        )
    return seed, hash_bytes


def _slab(slab: Shard) -> dict[str, Any]:
    """Return all of a slab but where it lies and how many blocks it has."""
    names = ("tp_rank", "tp_size", "pp_rank", "pp_size")
    return {"rank": {name: getattr(slab, name) for name in names}, "groups": list(map(_group, slab.groups))}


def _group(group: CacheGroup) -> dict[str, Any]:
    """Return every field of a group, new ones too, but its number of blocks; offsets are from a block's first byte."""
    begin = min(offset for part in group.components for offset in part.layer_offsets)
    found: dict[str, Any] = msgspec.to_builtins(group)
    del found["num_blocks"]
    found["scales"] = sorted(found["scales"], key=lambda scale: (scale["layer"], scale["tensor"]))
    for part in found["components"]:
        del part["region"]
        part["layer_offsets"] = [offset - begin for offset in part["layer_offsets"]]
    return found


def _digest_of_files(place: Path) -> str:
    """Return a digest of a local model's small files; a hub's model is named by its commit."""
    digest = hashlib.blake2b(digest_size=NAMESPACE_BYTES)
    for path in files_of(place):
        if any(path.match(pattern) for pattern in _MODEL_FILES):
            digest.update(json.dumps([path.name, hashlib.sha256(path.read_bytes()).hexdigest()]).encode())
    return digest.hexdigest()


def _digest_of_weights(vllm_config: "VllmConfig", model: "ModelConfig") -> str:
    return weights_of(str(model.model), model.revision, vllm_config.load_config.download_dir).digest


def _are_known(vllm_config: "VllmConfig", model: "ModelConfig") -> bool:
    """Return whether the digest of the model's files says what its weights are: the engine loads no others."""
    from vllm import envs

    load = vllm_config.load_config
    is_from_files = str(load.load_format) in _FORMATS_OF_FILES and not model.model_weights
    # The cache of Hugging Face's hub says nothing about what comes from another.
    is_elsewhere = envs.VLLM_USE_MODELSCOPE and not Path(str(model.model)).exists()
    return is_from_files and not is_elsewhere and are_known(str(model.model), model.revision, load.download_dir)


def unknown_weights(model: str) -> KVFerryError:
    """Return why weights that nothing identifies are not shared."""
    return SettingsError(
        Reason.UNKNOWN_WEIGHTS,
        f"the weights of {model} are in no local file and have no commit: nothing tells other weights from them.",
        'Set "model_id" to a name that changes with the weights, or load the model from a folder.',
    )

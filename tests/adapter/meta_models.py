"""vLLM's model classes without an engine: built on the meta device, without weights, as one of some ranks.

Stood in for are only the parts that a CPU lacks: process groups of other ranks, attention kernels (vLLM's GPU kernels
take blocks of any multiple of 16 tokens), quantised weights, and libraries for images and sound. The CPU platform's own
choices of block sizes and of states' dtypes are left out.
"""

import importlib.abc
import importlib.machinery
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import config as experts
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts_method
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

ABSENT = ("torchvision", "timm", "cutlass", "cuda")
"""Libraries that vLLM's model classes import, though not for a cache."""


class AnythingOfAClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: object) -> Any:
        return cls


class Anything(metaclass=AnythingOfAClass):
    """Takes any arguments; every attribute that it was not given is None."""

    def __init__(self, *_: Any, **given: Any) -> None:
        self.__dict__.update({"supports_quant_query_input": False, "dcp_world_size": 1, **given})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self


class AbsentLibrary(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnythingOfAClass(name, (Anything,), {})


class AbsentLibraries(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent libraries and all their modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentLibrary(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Builder(AttentionMetadataBuilder):  # type: ignore[type-arg]
    pass


class Kernel(AttentionBackend):
    """An attention back end that computes nothing and takes any head size."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> Any:
        return Anything

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []


class LatentKernel(Kernel):
    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"

    @classmethod
    def is_mla(cls) -> bool:
        return True


class SparseKernel(LatentKernel):
    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class Ranks:
    """One rank of a group of processes of which the others are not there."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.world_size, self.ranks = size, list(range(size))
        self.rank = self.rank_in_group = self.local_rank = rank
        self.first_rank, self.last_rank = 0, size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = self
        self.device_communicator = self.mq_broadcaster = None
        self.device = torch.device("cpu")

    def size(self) -> int:
        return self.world_size


class CacheSchemeAlone(QuantizationConfig):
    """A quantisation of the cache without one of the weights."""

    def __init__(self, scheme: dict[str, Any]) -> None:
        super().__init__()
        self.kv_cache_scheme = scheme

    def get_name(self) -> Any:
        return "compressed-tensors"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class AnyExperts:
    """A platform that is one of CUDA where experts ask for it, because only their kernels differ."""

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)

    def is_cuda_alike(self) -> bool:
        return True


def any_experts(select: Any) -> Any:
    """Return the choice of a kernel for experts, with one that computes nothing where there is none."""

    def selected(*arguments: Any, **given: Any) -> Any:
        try:
            return select(*arguments, **given)
        except (ValueError, NotImplementedError):
            return UnquantizedMoeBackend.TRITON, Anything

    return selected


class Tower(torch.nn.Module):
    """In the place of a tower: one without weights, which needs nothing after it has been made."""

    def post_init(self) -> None:
        pass


def towerless(make: Any) -> Any:
    """Return ``AutoModel.from_config`` with nothing in the place of towers for images and sound."""

    def from_config(config: Any, *arguments: Any, **given: Any) -> Any:
        is_text = hasattr(config.get_text_config(), "num_attention_heads") and not hasattr(config, "model_args")
        is_tower = any(word in type(config).__name__ for word in ("Vision", "Audio")) or not is_text
        return Tower() if is_tower else make(config, *arguments, **given)

    return from_config


def kernel_for(cls: Any, selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
    wanted = Kernel if not attn_selector_config.use_mla else LatentKernel
    wanted = SparseKernel if attn_selector_config.use_sparse else wanted
    return f"{Kernel.__module__}.{wanted.__name__}"


def prepare() -> None:
    """Put the stand-ins in their places."""
    sys.meta_path.append(AbsentLibraries())
    sys.modules.setdefault(Kernel.__module__, sys.modules[__name__])
    platform = type(current_platform)
    for name in ("check_and_update_config", "update_block_size_for_backend", "apply_config_platform_defaults"):
        setattr(platform, name, Platform.__dict__[name])
    platform.get_attn_backend_cls = classmethod(kernel_for)  # type: ignore[method-assign,assignment]
    platform.verify_quantization = classmethod(lambda cls, quant: None)  # type: ignore[method-assign,assignment]
    experts.current_platform = AnyExperts()  # type: ignore[assignment]
    experts_method.select_unquantized_moe_backend = any_experts(experts_method.select_unquantized_moe_backend)
    torch.cuda.Stream = Anything  # type: ignore[assignment,misc]
    item = torch.Tensor.item
    torch.Tensor.item = lambda tensor: 1.0 if tensor.is_meta else item(tensor)  # type: ignore[method-assign]
    transformers.AutoModel.from_config = towerless(transformers.AutoModel.from_config)
    registry._run_in_subprocess = lambda inspect: inspect()
    registry._LazyRegisteredModel._save_modelinfo_to_cache = lambda *_: None  # type: ignore[method-assign]


def stand_in_for_ranks(tp_rank: int, tp_size: int) -> None:
    for name in ("_PP", "_DP", "_DCP", "_PCP", "_INNER_DP_WORLD", "_EPLB"):
        setattr(parallel_state, name, Ranks(1))
    for name in ("_TP", "_ETP", "_WORLD", "_EP"):
        setattr(parallel_state, name, Ranks(tp_size, tp_rank))
    parallel_state._NODE_COUNT = 1


class Model:
    """One rank's model, and the cache that vLLM makes for it.

    ``asked`` has the ``path`` of a ``config.json``, ``tp`` (size), ``block_size``, ``layout``, and may have ``dtype``
    and ``prefix_caching``.
    """

    def __init__(self, asked: dict[str, Any], num_blocks: int, tp_rank: int = 0) -> None:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(asked["path"], Path(folder) / "config.json")
            self.config = config = _configuration_of(folder, asked)
            stand_in_for_ranks(tp_rank, asked["tp"])
            dtype = set_default_torch_dtype(config.model_config.dtype)
            with set_current_vllm_config(config), torch.device("meta"), dtype:
                initialize_model(vllm_config=config)
        with set_current_vllm_config(config):
            current_platform.update_block_size_for_backend(config)
            specs = get_kv_cache_spec(config)
            config.cache_config.kv_cache_layout = asked["layout"]
            config.cache_config.num_gpu_blocks_override = num_blocks
            groups = get_kv_cache_groups(config, specs)
            self.cache: KVCacheConfig = get_kv_cache_config_from_groups(config, groups, 1 << 40)


def _configuration_of(folder: str, asked: dict[str, Any]) -> Any:
    arguments = EngineArgs(
        model=folder,
        tokenizer=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        tensor_parallel_size=asked["tp"],
        distributed_executor_backend="mp" if asked["tp"] > 1 else None,
        block_size=asked["block_size"],
        dtype=asked.get("dtype") or "auto",
        enforce_eager=True,
        language_model_only=True,
        max_model_len=1024,
        enable_prefix_caching=asked.get("prefix_caching"),
    )
    config = arguments.create_engine_config()
    scheme = getattr(config.quant_config, "kv_cache_scheme", None)
    config.quant_config = CacheSchemeAlone(scheme) if scheme else None
    return config

"""Caches of models as vLLM's classes specify, group and view them: labels move between tensor-parallel sizes.

No engine runs. A label is a digest of what vLLM says an element means: its layer; the head, which vLLM's rule gives to
a rank; the token; the channel. The channels of a convolution are those that the weight loader of its layer gives to a
rank. Labels are written and looked for through vLLM's own views.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache_to_layers

from kvferry.errors import KVFerryError
from kvferry.integrations.vllm import translate
from kvferry.plan.match import GroupBlocks

from .meta_models import Model
from .vllm_caches import move

BLOCKS_OF_A_GROUP = 3
SHAPES = ((2, 1), (1, 2))
"""The tensor-parallel sizes of source and destination."""
EMPTY = -86
"""The byte that a destination is full of."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WrongBytesError(Exception):
    """Bytes are not where vLLM reads them, or elsewhere."""


@dataclass
class Rank:
    """One rank's model and its caches, bound to its layers as a worker binds them."""

    model: Model
    tp_rank: int
    views: dict[str, torch.Tensor]
    shard: Any

    @classmethod
    def of(cls, asked: dict[str, Any], tp_rank: int, tp_size: int, num_blocks: int) -> "Rank":
        model = Model({**asked, "tp": tp_size}, num_blocks, tp_rank)
        translate.check_supported(model.cache)
        with set_current_vllm_config(model.config):
            views = allocate_kv_cache(model.cache, torch.device("cpu"), KVCacheLayout[asked["layout"]])
            layers = model.config.compilation_config.static_forward_context
            bind_kv_cache_to_layers(views, layers, kv_cache_groups=model.cache.kv_cache_groups)
        return cls(model, tp_rank, views, translate.shard_of(model.config, model.cache, views, tp_rank))

    @property
    def storage(self) -> torch.Tensor:
        """All bytes of this rank's cache."""
        found = torch.tensor([], dtype=torch.int8)
        return found.set_(next(iter(self.views.values())).untyped_storage())  # type: ignore[call-overload]

    def layers(self) -> Iterator[tuple[int, str, Any]]:
        """Return each layer with the index of its group and its specification."""
        for index, group in enumerate(self.model.cache.kv_cache_groups):
            mixed = isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
            for name in group.layer_names:
                yield index, name, group.kv_cache_spec.kv_cache_specs[name] if mixed else group.kv_cache_spec

    def write_labels(self, blocks: Sequence[Sequence[int]], heads: dict[str, int], num_tokens: int) -> None:
        """Write the labels of a request over its blocks, of which each group has a list."""
        for group, name, spec in self.layers():
            if isinstance(spec, MambaSpec):
                conv, recurrent = self._layer(name).kv_cache
                write(conv[blocks[group][0]], self._conv_labels(name))
                first = self.tp_rank * recurrent.shape[1]
                write(recurrent[blocks[group][0]], labels(name, 2, first, recurrent.shape[1:]))
                continue
            view = self.views[name]
            first = first_head(self.tp_rank, self.model.config.parallel_config.tensor_parallel_size, heads[name])
            for position, block in enumerate(blocks[group]):
                held = max(0, min(spec.block_size, num_tokens - position * spec.block_size))
                shape = (view.shape[1], held, view.shape[3])
                write(view[block][:, :held], labels(name, 1, first, shape, position * spec.block_size))

    def contents(self, blocks: Sequence[Sequence[int]], num_tokens: int) -> torch.Tensor:
        """Return a copy of all bytes, with zeros behind the last token of a request, where any bytes may be."""
        for group, name, spec in self.layers():
            if not isinstance(spec, MambaSpec):
                unheld = self.views[name][blocks[group][-1]][
                    :, num_tokens - spec.block_size * len(blocks[group]) or spec.block_size :
                ]
                unheld.view(INTEGERS[unheld.element_size()]).zero_()
        return self.storage.clone()

    def _layer(self, name: str) -> Any:
        return self.model.config.compilation_config.static_forward_context[name]

    def _conv_labels(self, name: str) -> torch.Tensor:
        """Return labels by tap and global channel; the loader of the convolution's weights says which a rank has."""
        layer = self._layer(name)
        conv = layer.kv_cache[0]
        taps_first = get_conv_state_layout() == "SD"
        num_taps = conv.shape[1] if taps_first else conv.shape[2]
        channels = loaded_channels(layer.conv1d.weight, self.model.config.parallel_config.tensor_parallel_size)
        found = mix(crc32(name.encode()), 3, torch.arange(num_taps)[:, None], channels)
        return found if taps_first else found.T


def first_head(tp_rank: int, tp_size: int, total: int) -> int:
    """Return the first of a rank's heads: heads are shared out, and repeated where there are fewer than ranks."""
    return tp_rank * (total // tp_size) if total >= tp_size else tp_rank * total // tp_size


def loaded_channels(weight: Any, tp_size: int) -> torch.Tensor:
    """Return the global channels that a rank's loader puts into the weights of a convolution, in their order."""
    parameter = torch.Tensor._make_subclass(type(weight), torch.full(weight.shape, -1.0))
    parameter.__dict__.update(weight.__dict__)
    total = weight.shape[0] * tp_size
    numbers = torch.arange(total, dtype=torch.float32).view(-1, *[1] * (weight.dim() - 1))
    numbers = numbers.expand(total, *weight.shape[1:])
    shard_id = inspect.signature(weight.weight_loader).parameters.get("loaded_shard_id")
    if shard_id is not None and shard_id.default is inspect.Parameter.empty:
        for index, part in enumerate(numbers.chunk(3)):
            weight.weight_loader(parameter, part[:, 0] if weight.dim() > part[:, 0].dim() else part, index)
    else:
        weight.weight_loader(parameter, numbers)
    found = parameter.data.flatten(1)[:, 0].to(torch.int64)
    assert found.min() >= 0, "the loader left channels out"
    return found


def labels(name: str, part: int, first_head: int, shape: Sequence[int], first_token: int = 0) -> torch.Tensor:
    """Return a label for each element of ``shape``: heads, tokens or rows, channels."""
    axes = [torch.arange(size).view(-1, *[1] * (len(shape) - 1 - index)) for index, size in enumerate(shape)]
    axes[0] = axes[0] + first_head
    axes[1] = axes[1] + first_token
    return mix(crc32(name.encode()), part, *axes)


def mix(*axes: Any) -> torch.Tensor:
    """Return 64 bits for the coordinates of each element, all of which change with each coordinate."""
    found = torch.zeros((), dtype=torch.int64)
    for axis in axes:
        found = (found + axis + 1) * 0x2545F4914F6CDD1D
        found = found ^ (found >> 29)
    return found


def write(place: torch.Tensor, found: torch.Tensor) -> None:
    """Write the last bytes of labels over elements of any dtype."""
    integers = INTEGERS[place.element_size()]
    place.view(integers).copy_(found.to(integers))


def moved(asked: dict[str, Any]) -> dict[str, Any]:
    """Move a request between the sizes of ``SHAPES``, as :meth:`Oracle.moved` says."""
    num_bytes = 0
    asked = {**asked, "tp": 1, "prefix_caching": False}
    try:
        for sizes in SHAPES:
            num_bytes += _moved(asked, *sizes)
    except KVFerryError as error:
        return {"unsupported": error.message}
    except WrongBytesError as error:
        return {"differs": str(error)}
    return {"bytes": num_bytes}


def _moved(asked: dict[str, Any], source_size: int, destination_size: int) -> int:
    num_groups = len(Model(asked, 1).cache.kv_cache_groups)
    num_blocks = 1 + (num_groups + 1) * BLOCKS_OF_A_GROUP * 4
    sources = [Rank.of(asked, rank, source_size, num_blocks) for rank in range(source_size)]
    destinations = [Rank.of(asked, rank, destination_size, num_blocks) for rank in range(destination_size)]
    whole = sources[0] if source_size == 1 else destinations[0]
    heads = {name: view.shape[1] for name, view in whole.views.items()}
    sizes = [
        spec.block_size
        for rank in (*sources, *destinations)
        for _, _, spec in rank.layers()
        if not isinstance(spec, MambaSpec)
    ]
    num_tokens = max(sizes, default=1) * BLOCKS_OF_A_GROUP - 5
    source_blocks = blocks_of(sources[0], num_tokens, 1)
    destination_blocks = blocks_of(destinations[0], num_tokens, 2)
    for rank in sources:
        rank.write_labels(source_blocks, heads, num_tokens)
    requests = [
        GroupBlocks(
            group=str(group),
            first_token=0,
            last_token=1 if is_state else num_tokens,
            source_block_ids=source,
            destination_block_ids=destination,
        )
        for group, (source, destination, is_state) in enumerate(
            zip(source_blocks, destination_blocks, states_of(sources[0]), strict=True)
        )
    ]
    num_bytes = 0
    for rank in destinations:
        rank.storage.fill_(EMPTY)
        move(sources, rank, requests)
        found = rank.contents(destination_blocks, num_tokens)
        rank.storage.fill_(EMPTY)
        rank.write_labels(destination_blocks, heads, num_tokens)
        expected = rank.contents(destination_blocks, num_tokens)
        if num_wrong := int((found != expected).sum()):
            sizes_named = f"TP {source_size} to rank {rank.tp_rank} of TP {destination_size}"
            raise WrongBytesError(f"{num_wrong} bytes differ from TP {sizes_named}")
        num_bytes += int((expected != EMPTY).sum())
    return num_bytes


def states_of(rank: Rank) -> list[bool]:
    found = {group: isinstance(spec, MambaSpec) for group, _, spec in rank.layers()}
    return [found[group] for group in sorted(found)]


def blocks_of(rank: Rank, num_tokens: int, begin: int) -> list[list[int]]:
    """Return block ids of each group, of which none follows another."""
    sizes = {group: 0 if isinstance(spec, MambaSpec) else spec.block_size for group, _, spec in rank.layers()}
    found, free = [], begin
    for group in sorted(sizes):
        count = -(-num_tokens // sizes[group]) if sizes[group] else 1
        found.append(list(range(free + 2 * (count - 1), free - 1, -2)))
        free += 2 * count
    return found

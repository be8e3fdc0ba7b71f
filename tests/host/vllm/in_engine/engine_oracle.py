"""A vLLM worker extension that labels, finds and poisons KV cache blocks, for tests only.

Start the engine with ``--worker-extension-cls engine_oracle.EngineOracle``, with this folder and the project's in
``PYTHONPATH``, and ``VLLM_SERVER_DEV_MODE=1``; ``POST /collective_rpc`` then calls a method in every worker. Arguments
are JSON texts, since that URL passes strings.

The labels do not depend on kvferry: the oracle writes and reads them through vLLM's own views, per layer
``[B, H, N, C]`` and a Mamba layer's states, and takes a rank's heads and channels from vLLM's configuration and rank.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.execution.destination import NOTHING_COMPARED
from kvferry.integrations.vllm.translate import PLAIN_INSTRUCTION_SETS
from kvferry.plan.planner import LayerSpans
from tests.support.faults import FaultPlan, FaultyTransport

if TYPE_CHECKING:
    from kvferry.execution.destination import Compares
    from kvferry.integrations.vllm.worker.role import WorkerRole

# Limit of the elements of another page that equal a label by chance: labels have 23 bits.
CHANCE = 4
EXPONENT_OF_ONE_HALF = 0x3F000000
# Not a number: read as one float32 and as two bfloat16.
NAN = 0x7FC07FC0
Labels = NDArray[np.int32]


def labels_of(nonce: str, name: str, first: int, shape: tuple[int, int]) -> Labels:
    """Return an int32 hash for each channel of the rows (tokens, heads or channels) of ``name`` from ``first`` on.

    Read as float32 every label lies in [0.5, 1), so that an engine can compute with it.

    >>> labels = labels_of("x", "layer 0", 0, (4, 3))
    >>> bool(labels.view(np.float32).max() < 1), np.array_equal(labels[2:], labels_of("x", "layer 0", 2, (2, 3)))
    (True, True)
    """
    seed = zlib.crc32(f"{nonce}|{name}".encode())
    mixed = np.arange(first * shape[1], (first + shape[0]) * shape[1], dtype=np.uint64)
    mixed += np.uint64(seed) << np.uint64(32)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(factor)
    label = ((mixed >> np.uint64(41)) | np.uint64(EXPONENT_OF_ONE_HALF)).astype(np.int32)
    return label.reshape(shape)


def page_of(tokens: NDArray[Any], has_planes: bool) -> NDArray[Any]:
    """Return a page in the engine's order from an array of tokens (rows) and channels (columns).

    A page has one row per token, or (CPU attention) a plane of keys, channel by channel, then a plane of values.

    >>> page_of(np.array([[1, 2], [3, 4]]), has_planes=True).tolist()
    [[1, 3], [2, 4]]
    """
    if not has_planes:
        return tokens
    half = tokens.shape[1] // 2
    page: NDArray[Any] = np.concatenate([tokens[:, :half].T.ravel(), tokens[:, half:].ravel()])
    return page.reshape(tokens.shape)


class EngineOracle:
    """Methods that vLLM adds to its worker."""

    if TYPE_CHECKING:
        model_runner: Any
        vllm_config: Any
        _oracle_compares: Compares

    def oracle_label(self, text: str) -> dict[str, Any]:
        """Write labels over the blocks of one request: ``block_ids`` has a list for each cache group, in prompt order.

        The null block, which replaces blocks before a window, is not written. The last block holds the state.
        """
        order = json.loads(text)
        for layer in self._oracle_layers():
            block_ids = order["block_ids"][layer.group]
            if layer.is_state:
                for view, labels in self._oracle_state(layer.name, order["nonce"]):
                    view[block_ids[-1]] = labels
                continue
            for index, block_id in enumerate(block_ids):
                for local_head, head in enumerate(layer.heads if block_id else ()):
                    layer.view[block_id, local_head] = self._oracle_page(order["nonce"], layer, head, index)
        return {"groups": len(order["block_ids"])}

    def oracle_remember(self, text: str) -> dict[str, Any]:
        """Store a checksum of every page, from which :meth:`oracle_find` finds the pages that have changed.

        Labels of states are searched for as soon as the next load finishes: the engine's next step changes the states.
        """
        order = json.loads(text)
        self._oracle_sums = {layer.name: _page_sums(layer.view) for layer in self._oracle_layers()}
        self._oracle_arrived: dict[str, list[list[int]]] = {}
        states = [layer.name for layer in self._oracle_layers() if layer.is_state]
        role = _worker_role()
        take_finished = type(role).take_finished.__get__(role)

        def look_at_states(wait_seconds: float = 0.0) -> tuple[set[str], set[str]]:
            received: tuple[set[str], set[str]] = take_finished(wait_seconds)
            if received[0]:
                for name in states:
                    found = [_blocks_with(view, labels) for view, labels in self._oracle_state(name, order["nonce"])]
                    self._oracle_arrived.setdefault(name, []).extend(found)
            return received

        role.take_finished = look_at_states  # type: ignore[method-assign]
        return {"layers": len(self._oracle_sums)}

    def oracle_find(self, text: str) -> dict[str, Any]:
        """Search this engine's own pages for the labelled prompt of ``num_tokens``, in every layer and local head.

        In the answer, ``block_ids`` has for each group that this rank holds, and for each prompt block, the one block
        that holds the labels, or none for a block before the window. ``problems`` lists all differences. The engine
        computes the last prompt token itself: only that token's elements (one key and one value per head), the empty
        slots after it, and the tokens before the window may differ.
        """
        order = json.loads(text)
        problems: list[str] = []
        found: dict[int, dict[int, set[int]]] = {}
        for layer in self._oracle_layers():
            group = found.setdefault(layer.group, {})
            if layer.is_state:
                self._oracle_find_state(layer, group.setdefault(0, set()), problems)
            else:
                self._oracle_find_in_layer(order, layer, group, problems)
        for number, group in found.items():
            for index, block_ids in group.items():
                if len(block_ids) != 1:
                    where = f"group {number}, prompt block {index}"
                    problems.append(f"{where} is in the blocks {sorted(block_ids)} instead of in one")
        held = {block_id for group in found.values() for block_ids in group.values() for block_id in block_ids}
        problems.extend(self._oracle_changes_outside(held))
        ids = {
            str(number): [sorted(block_ids) for _, block_ids in sorted(group.items())]
            for number, group in sorted(found.items())
        }
        return {"block_ids": ids, "problems": problems[:20], "num_problems": len(problems)}

    def oracle_plugin(self) -> dict[str, bool]:
        """Return whether kvferry's plugin has registered the connector with vLLM in this worker."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        from kvferry.integrations.vllm.plugin import CONNECTORS

        return {"is_registered": CONNECTORS.keys() <= KVConnectorFactory._registry.keys()}

    def oracle_poison(self) -> dict[str, Any]:
        """Fill every block but the null block with NaN, as an earlier request may leave it.

        Call only while no request has blocks. An engine whose groups share pages can read such bytes without an error
        of kvferry: a state of one type can be NaN when read as keys of another.
        """
        layers = self._oracle_layers()
        for layer in layers:
            layer.view[1:] = NAN
        return {"layers": len(layers)}

    def oracle_faults(self, text: str) -> dict[str, Any]:
        """Inject a :class:`FaultPlan` into the transports with which this engine writes, or remove it (``null``).

        Call only while no transfer is running. The engine then connects to its peers again. With a plan, also an empty
        one, it compares no digests of what it loads: a negative control shows that the tokens tell.
        """
        plan = msgspec.json.decode(text, type=FaultPlan | None)
        role = _worker_role()
        transports = role._transports.transports
        for name, transport in transports.items():
            inner = transport._inner if isinstance(transport, FaultyTransport) else transport
            transports[name] = inner if plan is None else FaultyTransport(inner, plan)
        assert role._rank is not None
        source_engines = role._rank.source_engines
        if plan is None:
            source_engines._compares = getattr(self, "_oracle_compares", source_engines._compares)
        elif source_engines._compares != NOTHING_COMPARED:
            self._oracle_compares, source_engines._compares = source_engines._compares, NOTHING_COMPARED
        source_engines._engines.clear()
        assert role._source is not None
        destinations = role._source.writer.destinations
        for destination in destinations.known.values():
            destinations.connect_anew(destination)
        return {"transports": sorted(transports)}

    def oracle_spans(self, text: str) -> dict[str, Any]:
        """Write spans of so many layers from the next step on, so that a small model has several spans."""
        role = _worker_role()
        assert role._source is not None
        spans = role._source.writer.spans = LayerSpans(role._layers_that_report(), json.loads(text))
        return {"spans": len(spans.layers_of)}

    def _oracle_layers(self) -> list["Layer"]:
        """Return each layer that has a cache of its own, as int32, with the global indices of its heads."""
        from vllm.model_executor.models.utils import extract_layer_index
        from vllm.v1.kv_cache_interface import MambaSpec

        groups = self.model_runner.kv_cache_config.kv_cache_groups
        group_of = {name: index for index, group in enumerate(groups) for name in group.layer_names}
        views = self.model_runner.kv_caches  # in the order of the layers' indices, addressed by scheduler block ids
        layers = []
        for name, view in zip(sorted(group_of, key=extract_layer_index), views, strict=True):
            if name in self.model_runner.shared_kv_cache_layers:
                continue
            spec = groups[group_of[name]].kv_cache_spec
            is_state = isinstance(spec, MambaSpec)
            window = getattr(spec, "sliding_window", None) or 0
            heads = range(0) if is_state else self._oracle_heads(view)
            cache = _as_int32(view), heads, spec.block_size, window, is_state, view.element_size()
            kernel = self.vllm_config.compilation_config.static_forward_context[name]
            is_plain = getattr(kernel, "isa", "vec") in PLAIN_INSTRUCTION_SETS
            layers.append(Layer(name, group_of[name], *cache, is_plain))
        return layers

    def _oracle_page(self, nonce: str, layer: "Layer", head: int, index: int) -> Labels:
        labels = labels_of(nonce, f"{layer.name}|{head}", index * layer.block_size, layer.view.shape[2:])
        return page_of(labels, not self.vllm_config.model_config.use_mla)

    def _oracle_state(self, name: str, nonce: str) -> list[tuple[NDArray[np.int32], Labels]]:
        """Return the convolution's and the recurrent states of a layer, each with the labels of this rank.

        The layer is of Mamba2 or a gated delta net. The shapes are
        ``[B, taps, channels]`` or ``[B, channels, taps]``, and ``[B, heads, ..]``.
        """
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        layer = self.vllm_config.compilation_config.static_forward_context[name]
        conv, recurrent = (_in_words(state) for state in layer.kv_cache)
        rank, size = get_tensor_model_parallel_rank(), layer.tp_size
        in_a_word = 4 // layer.kv_cache[0].element_size()
        channels = [
            (part, first // in_a_word, count // in_a_word) for part, first, count in _conv_channels(layer, rank, size)
        ]
        taps = conv.shape[2] if is_conv_state_dim_first() else conv.shape[1]
        parts = [labels_of(nonce, f"{name}|{part}", first, (count, taps)) for part, first, count in channels]
        conv_labels = np.concatenate(parts)
        heads, width = recurrent.shape[1], recurrent.shape[2] * recurrent.shape[3]
        recurrent_labels = labels_of(nonce, f"{name}|heads", rank * heads, (heads, width)).reshape(recurrent.shape[1:])
        return [(conv, conv_labels if is_conv_state_dim_first() else conv_labels.T), (recurrent, recurrent_labels)]

    def _oracle_heads(self, view: Any) -> Sequence[int]:
        """Return a rank's global heads: equal shares, or one head for several neighbouring ranks."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        model, tp_size = self.vllm_config.model_config, self.vllm_config.parallel_config.tensor_parallel_size
        rank, num_heads = get_tensor_model_parallel_rank(), model.get_total_num_kv_heads()
        if model.use_mla:
            return range(1)
        if num_heads < tp_size:
            return [rank * num_heads // tp_size]
        return range(rank * view.shape[1], (rank + 1) * view.shape[1])

    def _oracle_find_in_layer(
        self, order: Mapping[str, Any], layer: "Layer", found: dict[int, set[int]], problems: list[str]
    ) -> None:
        last = order["num_tokens"] - 1
        first = max(0, last + 1 - layer.window) if layer.window else 0
        for index in range(first // layer.block_size, -(-last // layer.block_size)):
            slots = np.arange(layer.block_size) + index * layer.block_size
            num_elements = layer.view.shape[3] * 4 // layer.itemsize
            wanted = np.broadcast_to(((slots >= first) & (slots < last))[:, None], (layer.block_size, num_elements))
            elements = page_of(wanted, not self.vllm_config.model_config.use_mla)
            # A label of four bytes may cover elements of several tokens.
            must_equal = elements.reshape(*layer.view.shape[2:], -1).all(axis=-1)
            for local_head, head in enumerate(layer.heads):
                equal = layer.view[:, local_head] == self._oracle_page(order["nonce"], layer, head, index)
                candidates = np.flatnonzero(equal.sum(axis=(1, 2)) > CHANCE)
                if layer.is_plain:
                    whole = [int(block_id) for block_id in candidates if equal[block_id][must_equal].all()]
                else:
                    # Packed pages move whole. Elements of the decode engine's own token lie anywhere in one of them,
                    # each in a label that another token shares.
                    own = 2 * layer.view.shape[3] if index == last // layer.block_size else 0
                    whole = [int(block_id) for block_id in candidates if (~equal[block_id]).sum() <= own]
                if len(whole) != 1 or len(candidates) != 1:
                    where = f"{layer.name}, head {head}, prompt block {index}"
                    problems.append(f"{where}: whole in the blocks {whole}, in part in {candidates.tolist()}")
                found.setdefault(index, set()).update(whole)

    def _oracle_find_state(self, layer: "Layer", found: set[int], problems: list[str]) -> None:
        arrived = self._oracle_arrived.get(layer.name, [])
        if len(arrived) != 2 or any(len(block_ids) != 1 for block_ids in arrived):
            problems.append(f"{layer.name}: convolution and state are whole in the blocks {arrived}")
        found.update(block_id for block_ids in arrived for block_id in block_ids)

    def _oracle_changes_outside(self, expected: set[int]) -> list[str]:
        """Describe the blocks that changed since :meth:`oracle_remember` and do not belong to the prompt."""
        problems = []
        for layer in self._oracle_layers():
            before = getattr(self, "_oracle_sums", {}).get(layer.name)
            if before is not None:
                changed = set(np.flatnonzero((before != _page_sums(layer.view)).any(axis=1)).tolist()) - expected
                if changed:
                    problems.append(f"{layer.name}: blocks {sorted(changed)} of no prompt were written")
        return problems


class Layer(NamedTuple):
    """One layer's cache in vLLM's worker. A ``window`` of 0 means all tokens."""

    name: str
    group: int
    view: NDArray[np.int32]
    heads: Sequence[int]
    block_size: int
    window: int
    is_state: bool
    itemsize: int
    """Bytes of an element as the engine reads it."""
    is_plain: bool
    """Whether the inside of a page is as :func:`page_of` says; with AMX only the kernel knows it."""


def _conv_channels(layer: Any, rank: int, size: int) -> list[tuple[str, int, int]]:
    """Return a rank's segments of a convolution: name, first global channel, number of channels."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    if hasattr(layer, "num_v_heads"):
        widths = {"q": layer.key_dim // size, "k": layer.key_dim // size, "v": layer.value_dim // size}
        return [(part, rank * width, width) for part, width in widths.items()]
    own = layer.intermediate_size // size
    grouped = layer.n_groups * layer.ssm_state_size // size
    # Every rank holds the one group of a model; layer.n_groups then counts the group once per rank.
    first = rank * grouped if isinstance(layer.conv1d, MergedColumnParallelLinear) else 0
    return [("x", rank * own, own), ("B", first, grouped), ("C", first, grouped)]


def _blocks_with(view: NDArray[np.int32], labels: Labels) -> list[int]:
    """Return the blocks that hold all of these labels."""
    inner = tuple(range(1, view.ndim))
    return [int(block_id) for block_id in np.flatnonzero((view == labels).all(axis=inner))]


def _in_words(view: Any) -> NDArray[np.int32]:
    """Return the memory of a tensor as words of four bytes, whatever its type."""
    import torch

    words: NDArray[np.int32] = view.detach().view(torch.int32).numpy()
    return words


def _as_int32(view: Any) -> NDArray[np.int32]:
    array = _in_words(view)  # a state's page is a view of bytes
    if array.ndim != 4:
        raise ValueError(f"expected a [B, H, N, C] view of 4-byte elements, found {view.shape} of {view.dtype}")
    return array


def _page_sums(view: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return a sum of each page ``(block, head)`` that depends on the order of its elements."""
    weights = np.arange(1, 1 + view.shape[2] * view.shape[3], dtype=np.int64).reshape(view.shape[2:])
    sums: NDArray[np.int64] = np.einsum("bhnc,nc->bh", view.astype(np.int64), weights)
    return sums


def _worker_role() -> "WorkerRole":
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvferry.integrations.vllm.connector import KVFerryConnector

    connector = get_kv_transfer_group()
    assert isinstance(connector, KVFerryConnector)
    return connector._worker

"""A vLLM worker extension that labels, finds and spoils KV cache blocks, for tests only.

Start the engine with ``--worker-extension-cls kvferry.testing.engine_oracle.EngineOracle`` and
``VLLM_SERVER_DEV_MODE=1``; each method is then called in every worker through ``POST /collective_rpc``. Arguments
are JSON texts, since that end point passes strings.

The labels know nothing of kvferry: they are written and looked for through vLLM's own per-layer ``[B, H, N, C]``
views, and which heads a rank has follows from vLLM's configuration and rank.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.transport.faults import FaultPlan, FaultyTransport

if TYPE_CHECKING:
    from kvferry.integrations.vllm.worker_role import WorkerRole

# Elements of a foreign page that may equal a label by chance: labels are 23 bits wide.
CHANCE = 4
EXPONENT_OF_ONE_HALF = 0x3F000000
Labels = NDArray[np.int32]


def labels_of(nonce: str, layer: str, head: int, block_index: int, shape: tuple[int, int]) -> Labels:
    """Return what page ``(layer, head, block_index)`` of the prompt holds: an int32 hash for each ``(slot, channel)``.

    Read as float32 every label lies in [0.5, 1), so that an engine may compute with it.

    >>> first = labels_of("x", "layers.0", 0, 0, (2, 3))
    >>> bool((first != labels_of("x", "layers.0", 1, 0, (2, 3))).any()), bool((first.view(np.float32) < 1).all())
    (True, True)
    """
    seed = zlib.crc32(f"{nonce}|{layer}|{head}|{block_index}".encode())
    mixed = np.arange(shape[0] * shape[1], dtype=np.uint64) + (np.uint64(seed) << np.uint64(32))
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(factor)
    label = ((mixed >> np.uint64(41)) | np.uint64(EXPONENT_OF_ONE_HALF)).astype(np.int32)
    return label.reshape(shape)


def token_places(first_slot: int, shape: tuple[int, int], has_planes: bool) -> NDArray[np.bool_]:
    """Return where the tokens from ``first_slot`` on lie in a page of ``shape`` (slots, channels).

    A page is either one row a token, or (CPU attention) a plane of keys, channel by channel, then a plane of values.

    >>> int(token_places(3, (4, 6), has_planes=False).sum()), int(token_places(2, (4, 6), has_planes=True).sum())
    (6, 12)
    """
    num_slots, num_channels = shape
    if not has_planes:
        return np.broadcast_to(np.arange(num_slots)[:, None] >= first_slot, shape)
    is_late = np.arange(num_slots) >= first_slot
    keys = np.broadcast_to(is_late[None, :], (num_channels // 2, num_slots))
    values = np.broadcast_to(is_late[:, None], (num_slots, num_channels // 2))
    return np.concatenate([keys.ravel(), values.ravel()]).reshape(shape)


class EngineOracle:
    """Methods that vLLM adds to its worker."""

    if TYPE_CHECKING:
        model_runner: Any
        vllm_config: Any

    def oracle_label(self, text: str) -> dict[str, Any]:
        """Write labels over the blocks ``block_ids`` (of one request, in prompt order) in all layers and heads."""
        order = json.loads(text)
        for layer, view, heads in self._oracle_pages():
            for index, block_id in enumerate(order["block_ids"]):
                for local_head, head in enumerate(heads):
                    view[block_id, local_head] = labels_of(order["nonce"], layer, head, index, view.shape[2:])
        return {"pages": sum(len(heads) for _, _, heads in self._oracle_pages()) * len(order["block_ids"])}

    def oracle_remember(self) -> dict[str, Any]:
        """Take note of every page's content, for :meth:`oracle_find` to tell which ones have changed."""
        self._oracle_sums = {layer: _page_sums(view) for layer, view, _ in self._oracle_pages()}
        return {"layers": len(self._oracle_sums)}

    def oracle_find(self, text: str) -> dict[str, Any]:
        """Look for the labelled prompt blocks in this engine's own pages, in every layer and local head.

        ``block_ids`` names for each prompt block the one block that holds it; ``problems`` says what is wrong.
        The engine computes the last prompt token, at ``last_slot`` of the last block, itself: exactly that token's
        places (one key and one value per head) may differ, and those behind it, which hold no token.
        """
        order = json.loads(text)
        problems: list[str] = []
        found: list[set[int]] = [set() for _ in range(order["num_blocks"])]
        for layer, view, heads in self._oracle_pages():
            self._oracle_find_in_layer(order, layer, view, heads, found, problems)
        for index, block_ids in enumerate(found):
            if len(block_ids) != 1:
                problems.append(f"prompt block {index} is in the blocks {sorted(block_ids)} instead of in one")
        problems.extend(self._oracle_changes_outside(set().union(*found)))
        ids = [min(block_ids) if block_ids else None for block_ids in found]
        return {"block_ids": ids, "problems": problems[:20], "num_problems": len(problems)}

    def oracle_faults(self, text: str) -> dict[str, Any]:
        """Put a :class:`FaultPlan` between this engine and its transports, or take it out again (``null``).

        Only while no transfer is under way. Peers are met anew, through the transports as they now are.
        """
        plan = msgspec.json.decode(text, type=FaultPlan | None)
        role = _worker_role()
        transports = role._transports.transports
        for name, transport in transports.items():
            inner = transport._inner if isinstance(transport, FaultyTransport) else transport
            transports[name] = inner if plan is None else FaultyTransport(inner, plan)
        assert role._remote_engines is not None
        for engine in role._remote_engines._engines.values():
            engine.close()
        role._remote_engines._engines.clear()
        return {"transports": sorted(transports)}

    def _oracle_pages(self) -> list[tuple[str, NDArray[np.int32], Sequence[int]]]:
        """Return each layer's name, its ``[B, H, N, C]`` cache as int32, and its heads' global indices."""
        from vllm.model_executor.models.utils import extract_layer_index

        names = [name for group in self.model_runner.kv_cache_config.kv_cache_groups for name in group.layer_names]
        views = self.model_runner.kv_caches  # in the order of the layers' indices, addressed by scheduler block ids
        named = zip(sorted(names, key=extract_layer_index), views, strict=True)
        return [(name, _as_int32(view), self._oracle_heads(view)) for name, view in named]

    def _oracle_heads(self, view: Any) -> Sequence[int]:
        """Ranks get equal shares of the heads; where there are fewer heads than ranks, neighbours share one."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        model, tp_size = self.vllm_config.model_config, self.vllm_config.parallel_config.tensor_parallel_size
        rank, num_heads = get_tensor_model_parallel_rank(), model.get_total_num_kv_heads()
        if model.use_mla:
            return range(1)
        if num_heads < tp_size:
            return [rank * num_heads // tp_size]
        return range(rank * view.shape[1], (rank + 1) * view.shape[1])

    def _oracle_find_in_layer(
        self,
        order: Mapping[str, Any],
        layer: str,
        view: NDArray[np.int32],
        heads: Sequence[int],
        found: list[set[int]],
        problems: list[str],
    ) -> None:
        for local_head, head in enumerate(heads):
            for index in range(order["num_blocks"]):
                labels = labels_of(order["nonce"], layer, head, index, view.shape[2:])
                equal = view[:, local_head] == labels
                candidates = np.flatnonzero(equal.sum(axis=(1, 2)) > CHANCE)
                must_equal = self._oracle_must_equal(order, index, labels.shape)
                whole = [int(block_id) for block_id in candidates if equal[block_id][must_equal].all()]
                if len(whole) != 1 or len(candidates) != 1:
                    where = f"{layer}, head {head}, prompt block {index}"
                    problems.append(f"{where}: whole in the blocks {whole}, some of it in {candidates.tolist()}")
                found[index].update(whole)

    def _oracle_must_equal(self, order: Mapping[str, Any], index: int, shape: tuple[int, int]) -> NDArray[np.bool_]:
        """Return which places of a prompt block's page must hold their label."""
        if index < order["num_blocks"] - 1:
            return np.ones(shape, dtype=bool)
        return ~token_places(order["last_slot"], shape, has_planes=not self.vllm_config.model_config.use_mla)

    def _oracle_changes_outside(self, expected: set[int]) -> list[str]:
        """Name blocks that changed since :meth:`oracle_remember` and are none of the prompt's."""
        problems = []
        for layer, view, _ in self._oracle_pages():
            before = getattr(self, "_oracle_sums", {}).get(layer)
            if before is not None:
                changed = set(np.flatnonzero((before != _page_sums(view)).any(axis=1)).tolist()) - expected
                if changed:
                    problems.append(f"{layer}: the foreign blocks {sorted(changed)} were written")
        return problems


def _as_int32(view: Any) -> NDArray[np.int32]:
    array: NDArray[np.int32] = view.detach().numpy().view(np.int32)
    if array.ndim != 4 or not np.shares_memory(array, view.numpy()):
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

"""Roles of workers, without an engine."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm.settings import Settings
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard

from ..local.engines_in_process import IDENTITY


def make_worker_role(
    patch: pytest.MonkeyPatch,
    settings: Settings,
    shard: Shard | None = None,
    engine_id: str = "e",
    views: Mapping[str, Any] | None = None,
    configs: tuple[Any, Any] | None = None,
    **replaced: Any,
) -> Any:
    """Return the role of a rank, whose cache is registered where the ``shard`` is given; ``views`` are the engine's.

    ``configs``, vLLM's configurations of the engine and of its caches, take the place of the ``shard``: the product
    itself makes it of the views. ``replaced`` are what other functions return to the role, by name.
    """
    from kvferry.integrations.vllm.worker import role  # vLLM is imported by those who need it

    returned = {
        "get_tensor_model_parallel_rank": 0 if shard is None else shard.tp_rank,
        "get_pp_group": SimpleNamespace(rank_in_group=0),
        "identity_of": IDENTITY,
        **({} if configs else {"resolved_layout": NamedLayout.BHLNC, "register_caches": shard}),
        **replaced,
    }
    for name, value in returned.items():
        patch.setattr(role, name, lambda *_, value=value: value)
    parallel = SimpleNamespace(tensor_parallel_size=1 if shard is None else shard.tp_size, use_ubatching=False)
    transfer = SimpleNamespace(engine_id=engine_id, is_kv_consumer=True)
    config: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
    caches: Any = SimpleNamespace(kv_cache_groups=[])
    if configs:
        config, caches = configs
        config.parallel_config.use_ubatching, config.kv_transfer_config = False, transfer
    made = role.WorkerRole(config, caches, settings)
    if shard is not None or configs:
        made.register_kv_caches(views or {})
    return made

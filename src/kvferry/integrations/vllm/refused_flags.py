"""Flags of vLLM that cannot go with kvferry's connectors, known before an engine starts; docs/settings.md lists them.

What only the caches themselves show, the connectors refuse when they start: see ``translate.py``.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.errors import KVFerryError, LayoutError, Reason, SettingsError
from kvferry.integrations.vllm.connector_configs import CONNECTOR, OFFLOAD, ConnectorConfig
from kvferry.integrations.vllm.offload_names import check_hashes, why_private
from kvferry.integrations.vllm.offload_settings import OffloadSettings
from kvferry.integrations.vllm.settings import Found
from kvferry.integrations.vllm.versions import check_block_hashes, num_prefill_lookahead_tokens
from kvferry.layout.named_layouts import NamedLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LAYOUT = "VLLM_KV_CACHE_LAYOUT"
UNMOVED_DTYPES = ("nvfp4", "turboquant", "ultraquant")
"""How the names of cache types begin whose scales do not move with the blocks."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What a rule looks at: an engine's configuration, one of its connectors, and the settings of that."""

    config: "VllmConfig"
    connector: ConnectorConfig
    settings: Any

    @property
    def has_states(self) -> bool:
        """Whether the model has Mamba's states or others; an engine without a model, in tests, has none."""
        model = self.config.model_config
        return model is not None and bool(model.is_hybrid or model.is_attention_free)


@dataclass(frozen=True, slots=True)
class Rule:
    """A flag that is refused: ``when`` and ``remedy`` are what the page says; ``problem`` returns what was found.

    ``names`` are the settings that the rule looks at.
    """

    flag: str
    when: str
    remedy: str
    problem: Callable[[Engine], str]
    connectors: tuple[str, ...] = (CONNECTOR, OFFLOAD)
    names: tuple[str, ...] = ()
    reason: Reason = Reason.UNSUPPORTED
    kind: type[KVFerryError] = LayoutError

    def check(self, config: "VllmConfig", connector: ConnectorConfig, settings: Any) -> None:
        """Raise what is wrong."""
        if found := self.problem(Engine(config, connector, settings)):
            raise self.kind(self.reason, f"{found}.", self.remedy)


def _above_one(name: str) -> Callable[[Engine], str]:
    def problem(engine: Engine) -> str:
        size = getattr(engine.config.parallel_config, name)
        return f"{name} is {size}" if size > 1 else ""

    return problem


def _lookahead(engine: Engine) -> str:
    tokens = num_prefill_lookahead_tokens(engine.config)
    return f"the drafter embeds {tokens} tokens ahead of the prompt" if tokens > 1 else ""


def _draft_states(engine: Engine) -> str:
    drafts = engine.has_states and engine.config.speculative_config is not None
    return "the model has states, and states of draft tokens do not move" if drafts else ""


def _cached_states(engine: Engine) -> str:
    mode = engine.config.cache_config.mamba_cache_mode
    return f"the model has states that are cached by prefix ({mode})" if engine.has_states and mode != "none" else ""


def _quantised(engine: Engine) -> str:
    dtype = str(engine.config.cache_config.cache_dtype)
    return f"the cache's type is {dtype}" if dtype.startswith(UNMOVED_DTYPES) else ""


def _layout(engine: Engine) -> str:
    from kvferry.integrations.vllm.plugin import why_kernel_cannot_read

    named = os.environ.get(LAYOUT, "").upper()
    if engine.config.model_config is None or named not in NamedLayout.__members__:
        return ""  # vLLM has older names for some
    return why_kernel_cannot_read(engine.config, NamedLayout[named])


def _both_roles(engine: Engine) -> str:
    if not engine.settings.router_address or engine.connector.role != "kv_both":
        return ""
    return "router_address registers a prefill or a decode engine with a router, and this engine is both"


def is_data_parallel(config: "VllmConfig", engine_id: str | None) -> bool:
    """Return whether this engine is one of several data-parallel ranks.

    VLLM tells a data-parallel rank of a dense model that it is alone; only the engine's id shows the rank.
    """
    parallel = config.parallel_config
    return parallel.data_parallel_size > 1 or str(engine_id).endswith(f"_dp{parallel.data_parallel_index}")


def _ranks_of_router(engine: Engine) -> str:
    named = [name for name in ("router_address", "bootstrap_port") if getattr(engine.settings, name)]
    if not named or not is_data_parallel(engine.config, engine.connector.engine_id):
        return ""
    told = f"{named[0]} with data-parallel ranks (the engine's id is {engine.connector.engine_id!r})"
    return f"{told}: such a router's transfers name an engine and not a rank"


def _several_hosts(engine: Engine) -> str:
    several = engine.config.parallel_config.nnodes_within_dp > 1
    return "the ranks of an engine are on several hosts" if several else ""


RULES = (
    Rule(
        "--prefill-context-parallel-size",
        "above 1",
        "Run with --prefill-context-parallel-size 1.",
        _above_one("prefill_context_parallel_size"),
    ),
    Rule(
        "--decode-context-parallel-size",
        "above 1",
        "Run with --decode-context-parallel-size 1.",
        _above_one("decode_context_parallel_size"),
    ),
    Rule("--speculative-config", "several modules draft", "Run without multi-module drafting.", _lookahead),
    Rule("--speculative-config", "the model has states", "Run without speculative decoding.", _draft_states),
    Rule("--enable-prefix-caching", "the model has states", "Run with --no-enable-prefix-caching.", _cached_states),
    Rule(
        "--kv-cache-dtype",
        ", ".join(f"`{name}...`" for name in UNMOVED_DTYPES),
        "Run with --kv-cache-dtype auto or fp8.",
        _quantised,
    ),
    Rule(
        LAYOUT,
        "cross-layer, MLA on a CPU",
        f"Unset {LAYOUT}, or set it to LBNHC.",
        _layout,
        reason=Reason.KERNEL_CANNOT_READ_LAYOUT,
    ),
    Rule(
        "kv_role",
        "`kv_both` with `router_address`",
        'Set "kv_role" to "kv_producer" or "kv_consumer".',
        _both_roles,
        (CONNECTOR,),
        ("router_address",),
        Reason.INVALID_SETTING,
        SettingsError,
    ),
    Rule(
        "--data-parallel-size",
        "above 1 with `router_address` or `bootstrap_port`",
        "Run an engine for each rank, with an id that does not end in its _dp and number, or a router that sends the "
        "prefill engine's answer to the decode engine, without this setting.",
        _ranks_of_router,
        (CONNECTOR,),
        ("router_address", "bootstrap_port"),
        Reason.UNSUPPORTED,
        SettingsError,
    ),
    Rule("--nnodes", "an engine spans hosts", "Run all ranks of an engine on one host.", _several_hosts, (OFFLOAD,)),
    Rule(
        "--model",
        "the model has states",
        "Run without this connector.",
        lambda engine: "the model has states; only attention is offloaded" if engine.has_states else "",
        (OFFLOAD,),
    ),
)

NEEDED = (
    ("--prefix-caching-hash-algo sha256_cbor", "`disk_path` or `pool_master`, unless `PYTHONHASHSEED` is set"),
    ("--mm-processor-cache-gb", "these and images, unless prefixes are cached"),
)
"""Flags that are needed: :func:`~kvferry.integrations.vllm.offload_names.why_private` refuses an engine without."""
IGNORED = ("kv_port", "kv_buffer_device", "enable_permute_local_kv")
"""Fields of ``--kv-transfer-config`` that nothing of kvferry reads."""


def check_flags(config: "VllmConfig", connector: ConnectorConfig, found: Found[Any]) -> None:
    """Note in ``found`` every flag of vLLM that cannot go with this connector."""
    for rule in RULES:
        if connector.name in rule.connectors:
            found.note(rule.names, partial(rule.check, config, connector))
    if connector.name == OFFLOAD:
        found.note((), lambda _: check_block_hashes())
        found.note((), lambda _: check_hashes(config))
        found.note(("disk_path", "pool_master", "model_id"), lambda settings: _check_names(config, settings))


def _check_names(config: "VllmConfig", settings: OffloadSettings) -> None:
    """Refuse an engine whose names of blocks no other process could use, where others are to find the blocks."""
    is_shared = bool(settings.disk_path or settings.pool_master)
    if is_shared and config.model_config is not None and (private := why_private(config, settings.model_id)):
        raise private.without_traceback()

"""What an engine's API server says of the engine to ``kvferry check``, beside ``GET /ready``.

Where the engine's schedulers answer, and which options decide its cache. An engine with keys says it to whoever shows
by a signature of the time that he has a trusted key, another one to processes of its own host. Control end points say
the rest: they know their peers by TLS.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvferry.errors import KVFerryError
from kvferry.handoff.handshake import OURS
from kvferry.handoff.messages import Text, Unsigned
from kvferry.handoff.wire.trust import Keys, Trust, check_host, is_loopback
from kvferry.integrations.vllm.settings import NO_KEYS, Settings, control_port
from kvferry.integrations.vllm.versions import can_name_loaded_groups
from kvferry.peer_log import printable

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PATH = "/ready"
MIDDLEWARE = "kvferry.integrations.vllm.readiness.Readiness"
"""What answers there, as it is given to ``--middleware``."""
ASKS = "x-kvferry-check"
"""The header of a question for the facts; its value is :func:`signed_now`, or empty without keys."""
FORWARDED = (b"forwarded", b"via", b"x-forwarded-", b"x-real-ip", b"x-envoy-", b"x-request-id")
"""How the names of a proxy's headers begin: the client that asked it may be on another host."""
THIS_HOST = ("127.0.0.1", "::1")
"""Where clients of this host come from; side cars connect from other addresses of loopback."""
CLOCK_SECONDS = 60.0
"""How far the clocks of two hosts may be apart."""
MAX_FACTS_BYTES = 1 << 18
OPTIONS = {
    "--model": ("model_config", "model"),
    "--revision": ("model_config", "revision"),
    "--quantization": ("model_config", "quantization"),
    "--dtype": ("model_config", "dtype"),
    "--max-model-len": ("model_config", "max_model_len"),
    "--kv-cache-dtype": ("cache_config", "cache_dtype"),
    "--block-size": ("cache_config", "block_size"),
    "--enable-prefix-caching": ("cache_config", "enable_prefix_caching"),
    "--disable-hybrid-kv-cache-manager": ("scheduler_config", "disable_hybrid_kv_cache_manager"),
    "--tensor-parallel-size": ("parallel_config", "tensor_parallel_size"),
    "--pipeline-parallel-size": ("parallel_config", "pipeline_parallel_size"),
}
"""vLLM's options that decide what a cache is, and where vLLM's configuration has them."""
DRAFT = "--speculative-config"
_DRAFT_FIELDS = ("method", "model", "num_speculative_tokens")
SETTINGS = ("model_id", "integrity", "transport")
UCX_PORTS = "UCX_TCP_PORT_RANGE"
"""The variable that limits NIXL's ports."""
MAX_VALUE_LENGTH = 512
Value = Annotated[str, msgspec.Meta(max_length=MAX_VALUE_LENGTH)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Fingerprint = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
_SIGNED = re.compile(r"([0-9]{1,12})\.([0-9a-f]{144})")


class EngineFacts(msgspec.Struct, frozen=True):
    """What an engine says of itself.

    Its schedulers answer processes of its host at ``host`` and ``ports``, one for each data-parallel rank, others at
    ``reachable_host``. ``role`` is vLLM's ``kv_role``; ``oldest`` and ``newest`` are versions of the protocol. ``key``
    is the fingerprint of the engine's certificate, empty without keys, and ``trusted`` are those that it trusts;
    without keys it connects to ``allowed_hosts``, or anywhere. ``requires_digests``, ``caches_prefixes`` and
    ``clears_in_part`` decide which loads it refuses. ``options`` have values in words.
    """

    host: Value
    reachable_host: Value
    ports: Annotated[tuple[Port, ...], msgspec.Meta(min_length=1, max_length=1024)]
    role: Value
    oldest: Unsigned
    newest: Unsigned
    key: Fingerprint
    trusted: Annotated[tuple[Fingerprint, ...], msgspec.Meta(max_length=1024)]
    connects_anywhere: bool
    allowed_hosts: Annotated[tuple[Value, ...], msgspec.Meta(max_length=1024)]
    requires_digests: bool
    caches_prefixes: bool
    clears_in_part: bool
    options: Annotated[dict[Value, Value], msgspec.Meta(max_length=64)]

    def __post_init__(self) -> None:
        for host in (self.host, self.reachable_host):
            check_host(host)


class ReadyAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to ``GET /ready``: with a reason where the engine is not ready, with facts for those who may ask."""

    ready: bool
    reason: Text = ""
    engine: EngineFacts | None = None


def facts_of(vllm_config: "VllmConfig", settings: Settings, keys: Keys | None) -> EngineFacts:
    """Return what an engine with a fixed port says of itself. Raises as :func:`control_port`."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    assert transfer is not None, "an engine without a connector says nothing"
    return EngineFacts(
        host=settings.local_host,
        reachable_host=settings.reachable_host,
        ports=tuple(control_port(settings, rank) for rank in local_ranks(parallel)),
        role=str(transfer.kv_role),
        oldest=OURS.oldest,
        newest=OURS.newest,
        key="" if keys is None else keys.fingerprint,
        trusted=() if keys is None else tuple(keys.trusted)[:1024],
        connects_anywhere=settings.keys == NO_KEYS and not settings.allowed_hosts,
        allowed_hosts=settings.allowed_hosts[:1024],
        requires_digests=settings.requires_digests,
        caches_prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
        clears_in_part=can_name_loaded_groups(),
        options=options_of(vllm_config, settings),
    )


def local_ranks(parallel: Any) -> range:
    """Return the data-parallel ranks behind this API server; ``parallel`` is vLLM's ``ParallelConfig``."""
    first: int = parallel.data_parallel_index
    return range(first, first + max(parallel.data_parallel_size_local, 1))


def options_of(vllm_config: Any, settings: Settings) -> dict[str, str]:
    """Return the options that decide what moves and where, in words, but no option that this vLLM lacks."""
    found = {
        option: getattr(part, name)
        for option, (config, name) in OPTIONS.items()
        if hasattr(part := getattr(vllm_config, config, None), name)
    }
    drafting = getattr(vllm_config, "speculative_config", None)
    found[DRAFT] = drafting and ", ".join(f"{name} {getattr(drafting, name, None)}" for name in _DRAFT_FIELDS)
    named = {option: "none" if value is None else str(value).removeprefix("torch.") for option, value in found.items()}
    named[UCX_PORTS] = os.environ.get(UCX_PORTS, "none")
    named |= {name: str(value) if (value := getattr(settings, name)) else "none" for name in SETTINGS}
    return {option: printable(value)[:MAX_VALUE_LENGTH] for option, value in named.items()}


def signed_now(keys: Keys | None) -> str:
    """Return what asks an engine for its facts: empty without keys, else the time, signed by a key."""
    if keys is None:
        return ""
    now = str(int(time.time()))
    return f"{now}.{keys.sign(_question(now)).hex()}"


def may_ask(trust: Trust, client: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether an engine says its facts to the client of an HTTP request, ``client`` being its address."""
    given: Mapping[bytes, bytes] = dict(headers)
    if ASKS.encode() not in given:
        return False
    if trust.keys is None:
        # A name would let a page in a browser ask, whose name leads here.
        asked_at = re.sub(r":[0-9]*\Z", "", given.get(b"host", b"").decode("latin-1")).strip("[]")
        is_direct = not any(name.lower().startswith(FORWARDED) for name in given)
        return client in THIS_HOST and is_direct and (asked_at == "localhost" or is_loopback(asked_at))
    signed = _SIGNED.fullmatch(given[ASKS.encode()].decode("latin-1"))
    if signed is None or abs(int(signed[1]) - time.time()) > CLOCK_SECONDS:
        return False
    try:
        trust.keys.check(_question(signed[1]), bytes.fromhex(signed[2]))
    except KVFerryError:
        return False
    return True


def _question(told_at: str) -> bytes:
    return b"facts\0" + told_at.encode()

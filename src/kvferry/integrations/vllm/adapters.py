"""Which weights vLLM has read for an adapter: they may change while the engine runs.

Stored blocks of an adapter are named by a digest of these weights (:meth:`Adapters.names`), and prompts of different
adapters do not move between engines (:mod:`~kvferry.integrations.vllm.scheduler.params`).

vLLM's hash of a block has the adapter's name and path, and the same path has other weights after the next training.
vLLM reads the files of an adapter in ``add_lora``, else in the first step of a request that asks for the adapter's id,
and in each step of a request with ``load_inplace``. It may also read them again unheard, where its cache of adapters
had dropped this one. So a digest belongs to an id. It is read around ``add_lora`` (:func:`hear_of_loads`), else when
the first request comes, and is believed for as long as the files stay as they are: before a block is made, and again
when the block has been stored, since vLLM may have read the files in between. Once they have changed, the
engine's weights are unknown: requests of that id load and store nothing, until vLLM reads the files for certain.
"""

import hashlib
import logging
import secrets
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from kvferry.integrations.vllm.identity import Weights, digest_of_files, files_of, snapshot_of
from kvferry.integrations.vllm.offload_names import NAMESPACE_BYTES, BlockNames, unknown_weights
from kvferry.integrations.vllm.versions import replace_once

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt", CONFIG)
"""What vLLM reads of an adapter's folder."""
_UNREAD = Weights("", are_known=False)


@dataclass(slots=True, eq=False)
class AdapterRead:
    """What vLLM has read for an id, and the state of the files then. ``is_current``: nothing speaks against it."""

    adapter_id: int
    path: str
    state: Hashable
    weights: Weights
    is_current: bool = True

    def is_certain(self) -> bool:
        """Return whether vLLM still has these weights, whenever it has read the files; look at the files."""
        state = _state_of(self.path) if self.is_current and self.state is not None else None
        if state not in (self.state, None):
            found = None
            with suppress(OSError):
                found = _weights_of(self.path)
            if found == self.weights:  # a copy of the same files, by rsync for example
                self.state = state
            else:
                self.doubt(f"{self.path} has changed since vLLM read it")
        return self.is_current

    def doubt(self, why: str) -> None:
        """Believe these weights no longer."""
        if self.is_current:
            self.is_current = False
            logger.warning("kvferry: requests of adapter %d load and store nothing: %s.", self.adapter_id, why)


class Adapters:
    """The adapters of one engine."""

    def __init__(self) -> None:
        self._read: dict[int, AdapterRead] = {}
        """By id."""
        self._digests: defaultdict[str, set[str]] = defaultdict(set)
        """By path: of all weights that vLLM has read there."""
        self._stale: set[str] = set()
        """Paths whose earlier weights may have left blocks in vLLM's own prefix cache, under the same hash."""
        self._of_this_process = secrets.token_bytes(NAMESPACE_BYTES)
        _all_adapters.add(self)

    def names(
        self, names: BlockNames, path: str, adapter_id: int = 1, *, is_read_again: bool = False
    ) -> BlockNames | None:
        """Return the names for requests of an adapter, a folder or a hub's name as ``LoRARequest.lora_path``.

        None where the files have changed since vLLM read them, or the id has those of another path, and they are not
        ``is_read_again`` for the request. Once an adapter has had other weights at the same path, its names are
        private: vLLM's own cache may still hold blocks of the earlier weights under the same hash, and no other process
        may find what is computed behind them. So are the names of a hub's adapter without a commit. Raises ``OSError``
        for files that cannot be read.
        """
        read = self._of(path, adapter_id, is_read_again=is_read_again)
        if not read.is_current:
            return None
        is_replaced = len(self._digests[path]) > 1
        # Of the namespace, not of the facts: a renewed one is random.
        content = names.namespace + read.weights.digest.encode() + (self._of_this_process if is_replaced else b"")
        namespace = hashlib.blake2b(content, digest_size=NAMESPACE_BYTES).digest()
        private = names.private or (None if read.weights.are_known and not is_replaced else unknown_weights(path))
        facts = {**names.facts, "adapter": read.weights.digest}
        return replace(names, namespace=namespace, facts=facts, private=private, is_certain=read.is_certain)

    def read_by(self, request: "LoRARequest") -> AdapterRead:
        """Return what vLLM has read, or is about to read, for requests of this adapter.

        Raises ``OSError`` for files that cannot be read.
        """
        return self._of(request.lora_path, request.lora_int_id, is_read_again=request.load_inplace)

    def may_be_stale(self, path: str) -> bool:
        """Return whether vLLM's prefix cache may have blocks of earlier weights of this path."""
        return path in self._stale

    def prefix_cache_is_empty(self) -> None:
        """VLLM has cleared its prefix cache."""
        self._stale.clear()

    @contextmanager
    def reading(self, path: str, adapter_id: int, *, is_read_again: bool) -> Iterator[None]:
        """Note what vLLM reads within the block: the files, unless it has read them for this id before.

        Files that change meanwhile are of no certain weights.
        """
        earlier, before = self._read.get(adapter_id), None
        with suppress(OSError):
            before = _state_of(path)
        try:
            yield
        except BaseException:
            if earlier is not None:
                earlier.doubt(f"{path} could not be read again")  # by some rank, maybe not by all
            raise
        if earlier is None or is_read_again:
            # Of a hub's adapter there is no state before the first download.
            is_new = before is None and not Path(path).exists()
            try:
                read = self._keep(path, adapter_id)
            except OSError as error:
                read = self._read[adapter_id] = AdapterRead(adapter_id, path, before, _UNREAD)
                read.doubt(str(error))
            if not is_new and read.state != before:
                read.doubt(f"{path} has changed while vLLM read it")

    def _of(self, path: str, adapter_id: int, *, is_read_again: bool) -> AdapterRead:
        """Return what vLLM has read for this id; read it where vLLM does and the files are not those of the last time.

        Where nothing tells their state, they are read each time that vLLM reads them, and else taken for unchanged.
        """
        read = self._read.get(adapter_id)
        if read is None:
            return self._keep(path, adapter_id)
        if is_read_again:
            is_same = read.is_current and read.path == path and read.state is not None
            return read if is_same and _state_of(path) == read.state else self._keep(path, adapter_id)
        if read.path != path:
            read.doubt(f"its id has had the weights of {read.path}, and is to have those of {path}")
        else:
            read.is_certain()
        return read

    def _keep(self, path: str, adapter_id: int) -> AdapterRead:
        """Read the files for an id; what is being stored with its earlier weights has none that are certain."""
        read = AdapterRead(adapter_id, path, _state_of(path), _weights_of(path))
        if (earlier := self._read.get(adapter_id)) is not None:
            earlier.is_current = False
        self._read[adapter_id] = read
        self._digests[path].add(read.weights.digest)
        if len(self._digests[path]) > 1:
            self._stale.add(path)
        return read


_all_adapters: WeakSet[Adapters] = WeakSet()
"""Of the engines of this process. One that hears of another's load as well believes less, and never too much."""


def hear_of_loads() -> None:
    """Let the engines of this process hear of each ``add_lora``, which the scheduler does not. Safe to call again."""
    from vllm.v1.engine.core import EngineCore

    def telling(add_lora: Any) -> Any:
        def add_lora_and_tell(core: "EngineCore", lora_request: "LoRARequest") -> bool:
            path, adapter_id = lora_request.lora_path, lora_request.lora_int_id
            with ExitStack() as readers:
                for adapters in list(_all_adapters):
                    readers.enter_context(adapters.reading(path, adapter_id, is_read_again=lora_request.load_inplace))
                return bool(add_lora(core, lora_request))

        return add_lora_and_tell

    replace_once(EngineCore, "add_lora", telling)


def _state_of(path: str) -> Hashable:
    """Return what changes with the files of an adapter, without reading them: of a hub's adapter the commit.

    None where nothing tells: the files are gone, so vLLM has not read them again, or a hub's adapter has no commit.
    """
    place = Path(path)
    if not place.exists():
        snapshot = snapshot_of(path, CONFIG)
        return None if snapshot is None else snapshot.name
    found = [(file.name, file.stat()) for file in files_of(place) if file.name in FILES]
    return tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in found)


def _weights_of(path: str) -> Weights:
    """Return the digest of an adapter's weights and of its own configuration, which has their scale.

    The path is no part of the digest. Unknown weights have a name that no other process knows.
    """
    place = Path(path)
    folder = place if place.exists() else snapshot_of(path, CONFIG)
    named = {} if folder is None else {file.name: file for file in files_of(folder) if file.name in FILES}
    config = named.pop(CONFIG, None)
    if not named:
        return Weights(secrets.token_hex(DIGEST_BYTES), are_known=False)
    found = hashlib.blake2b(digest_of_files(list(named.values())).encode(), digest_size=DIGEST_BYTES)
    if config is not None:
        found.update(hashlib.sha256(config.read_bytes()).digest())
    return Weights(found.hexdigest(), are_known=True)

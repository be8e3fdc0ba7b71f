"""The names of blocks of requests with an adapter, whose weights may change while the engine runs.

vLLM's hash of a block has the adapter's name and path, and the same path has other weights after the next training.
vLLM reads the files of an adapter when an adapter's id comes for the first time, and in each step of a request that
asks for it (``load_inplace``). It may also read them again unheard: where ``add_lora`` was called, and where its cache
of adapters had dropped this one. So a digest belongs to an id, is read when vLLM reads, and is believed for as long as
the files stay as they are. Once they have changed, nobody knows here which weights the engine has: requests of that id
have no names, until vLLM reads the files for certain.
"""

import hashlib
import logging
import secrets
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.integrations.vllm.offload_names import NAMESPACE_BYTES, BlockNames, unknown_weights
from kvferry.integrations.vllm.translate.weights import SUFFIXES, Weights, files_of, weights_of

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Read:
    """What vLLM has read for an id, and the state of the files then. ``is_current``: they have not changed since."""

    state: Hashable
    weights: Weights
    is_current: bool = True


class Adapters:
    """The adapters of one engine."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, int], _Read] = {}
        """By path and id."""
        self._digests: defaultdict[str, set[str]] = defaultdict(set)
        """By path: of all weights that vLLM has read there."""
        self._of_this_process = secrets.token_bytes(NAMESPACE_BYTES)

    def names(
        self, names: BlockNames, path: str, adapter_id: int = 1, *, is_read_again: bool = False
    ) -> BlockNames | None:
        """Return the names for requests of an adapter, a folder or a hub's name as ``LoRARequest.lora_path``.

        None where the files have changed since vLLM read them, and are not ``is_read_again`` for the request. Once an
        adapter has had other weights at the same path, its names are private: vLLM's own cache may still hold blocks
        of the earlier weights under the same hash, and no other process may find what is computed behind them. So are
        the names of a hub's adapter without a commit. Raises ``OSError`` for files that cannot be read.
        """
        read = self._of(path, adapter_id, is_read_again=is_read_again)
        if not read.is_current:
            return None
        is_replaced = len(self._digests[path]) > 1
        # Of the namespace, not of the facts: a renewed one is random.
        content = names.namespace + read.weights.digest.encode() + (self._of_this_process if is_replaced else b"")
        namespace = hashlib.blake2b(content, digest_size=NAMESPACE_BYTES).digest()
        private = names.private or (None if read.weights.are_known and not is_replaced else unknown_weights(path))
        return replace(
            names, namespace=namespace, facts={**names.facts, "adapter": read.weights.digest}, private=private
        )

    def _of(self, path: str, adapter_id: int, *, is_read_again: bool) -> _Read:
        """Return what vLLM has read for this id; read it where vLLM does and the files are not those of the last time.

        Where nothing tells their state, they are read each time that vLLM reads them, and else taken for unchanged.
        """
        state, read = _state_of(path), self._read.get((path, adapter_id))
        is_same = read is not None and read.is_current and state == read.state
        if read is None or (is_read_again and not (is_same and state is not None)):
            read = self._read[path, adapter_id] = _Read(state, _weights_of(path))
            self._digests[path].add(read.weights.digest)
        elif read.is_current and state is not None and not is_same:
            read.is_current = False
            told = "kvferry: requests of adapter %d load and store nothing: %s has changed since vLLM read it."
            logger.warning(told, adapter_id, path)
        return read


def _state_of(path: str) -> Hashable:
    """Return what changes with the files of an adapter, without reading them: of a hub's adapter the commit.

    None where nothing tells: the files are gone, so vLLM has not read them again, or a hub's adapter has no commit.
    """
    place = Path(path)
    if not place.exists():
        weights = weights_of(path, config="adapter_config.json")
        return weights.digest if weights.are_known else None
    found = [(file.name, file.stat()) for file in _files_of(place)]
    return tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in found)


def _weights_of(path: str) -> Weights:
    """Return the digest of an adapter's weights and of its own configuration, which has their scale.

    Unknown weights have a name that no other process knows.
    """
    weights = weights_of(path, config="adapter_config.json")
    if not weights.are_known:
        return Weights(secrets.token_hex(NAMESPACE_BYTES), are_known=False)
    found = hashlib.blake2b(weights.digest.encode(), digest_size=NAMESPACE_BYTES)
    for file in _files_of(Path(path)):
        if file.suffix == ".json":
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return Weights(found.hexdigest(), are_known=True)


def _files_of(place: Path) -> list[Path]:
    return [file for file in files_of(place) if file.suffix in (*SUFFIXES, ".json")]

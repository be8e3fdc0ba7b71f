"""A digest of the weights that an engine has loaded, from samples of every tensor in the model's files.

Reading all weights would take as long as loading them again. Fine-tuning, a merged adapter and another quantisation
change whole tensors, so each tensor is sampled, and a small one is read whole. The digest misses a change of a few
numbers between two samples.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLE_BYTES = 4096
MAX_SAMPLES = 16384
"""Of all files together, unless there are more tensors: bounds the time to a second where the files are in memory."""
MAX_SAMPLES_PER_SPAN = 8
SPANS_PER_FILE = 1024
"""A file of another format than safetensors is sampled in as many equal parts."""

Span = tuple[int, int]
"""The first byte and the length of a tensor, or of a part of a file."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A digest. Without ``are_known`` the digest is of a name alone: equal digests do not mean equal weights."""

    digest: str
    are_known: bool


def weights_of(model: str, revision: str | None = None, cache: str | None = None) -> Weights:
    """Return the digest of a local folder or file, or of a hub's model at this revision.

    A hub's model is named by its commit, which stands for its files. ``cache`` is the folder of the hub's models on
    this machine where it is not the default.
    """
    place = Path(model)
    if place.exists():
        files = sorted(path for path in files_of(place) if path.suffix in SUFFIXES)
        return Weights(digest_of_files(files), are_known=bool(files))
    snapshot = snapshot_of(model, "config.json", revision, cache)
    commit = None if snapshot is None else snapshot.name
    named = f"{model}@{commit or revision or 'default'}"
    return Weights(hashlib.blake2b(named.encode(), digest_size=16).hexdigest(), are_known=commit is not None)


def files_of(place: Path) -> list[Path]:
    """Return the files of a local model: those in its folder, or the one file that it is; none for a hub's model."""
    if place.is_dir():
        return [path for path in sorted(place.iterdir()) if path.is_file()]
    return [place] if place.is_file() else []


def snapshot_of(model: str, config: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Return the folder of a hub's model at this revision in this machine's cache; None where the cache has none.

    ``config`` is a file that each such model has. The folder has the name of the commit.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(model, config, cache_dir=cache, revision=revision)
    except ValueError:
        return None  # not a name of a model on the hub
    return Path(path).parent if isinstance(path, str) else None


def digest_of_files(files: Sequence[Path]) -> str:
    """Return a digest of these files of weights, in their order: names, sizes, headers and samples of each tensor."""
    digest = hashlib.blake2b(digest_size=16)
    spans = []
    for path in files:
        with path.open("rb") as file:
            header, found = _spans(file, path.stat().st_size)
        spans.append(found)
        digest.update(json.dumps([path.name, path.stat().st_size, hashlib.sha256(header).hexdigest()]).encode())
    num_samples = min(max(MAX_SAMPLES // max(sum(map(len, spans)), 1), 1), MAX_SAMPLES_PER_SPAN)
    for path, found in zip(files, spans, strict=True):
        with path.open("rb", buffering=0) as file:
            for begin, length in (sample for span in found for sample in _samples(span, num_samples)):
                file.seek(begin)
                digest.update(file.read(length))
    return digest.hexdigest()


def _spans(file: BinaryIO, size: int) -> tuple[bytes, list[Span]]:
    """Return the header of a file, which names the tensors, and where they lie; the header is empty where unknown."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size - 8:
            raise ValueError
        header = file.read(length)
        tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
        first = 8 + length
        offsets = [tensor["data_offsets"] for tensor in tensors.values()]
        return header, sorted((first + begin, end - begin) for begin, end in offsets)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        each = -(-size // SPANS_PER_FILE)
        return b"", [(begin, min(each, size - begin)) for begin in range(0, size, each or 1)]


def _samples(span: Span, count: int) -> Iterator[Span]:
    """Yield ``count`` samples, from the first byte to the last; one sample alone is from the middle."""
    begin, length = span
    if length <= count * SAMPLE_BYTES:
        yield span
        return
    room = length - SAMPLE_BYTES
    places = [room // 2] if count == 1 else [room * index // (count - 1) for index in range(count)]
    yield from ((begin + place, SAMPLE_BYTES) for place in places)

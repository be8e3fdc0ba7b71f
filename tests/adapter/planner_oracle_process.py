"""Answers, one JSON object a line, about what vLLM itself makes of a model's ``config.json``: its cache groups, or
whether labelled bytes of its caches reach their places in caches of another tensor-parallel size (moved_models).

Each answer comes from a process of its own, forked from this one, which has imported vLLM: it makes vLLM's
configuration, builds vLLM's model class on the meta device, asks each layer for its specification, and runs vLLM's
grouping. What is stood in for is said in meta_models.
"""

import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from .meta_models import Model, prepare
from .moved_models import moved

SECONDS, DATA_BYTES, NUM_BLOCKS = 100, 12 << 30, 4


def layer_of(name: str, config: Any) -> int:
    """Return a layer's number; Falcon-H1 counts the Mamba layers on behind the attention layers."""
    return extract_layer_index(name) % config.model_config.get_total_num_hidden_layers()


def described(spec: Any) -> dict[str, Any]:
    found = {
        "kind": get_kv_cache_spec_kind(spec).value,
        "window": get_kv_cache_spec_sliding_window(spec) or 0,
        "page_bytes": spec.page_size_bytes,
        "block_size": spec.block_size,
    }
    if isinstance(spec, AttentionSpec):
        found |= {"kv_heads": spec.num_kv_heads, "head_size": spec.head_size, "itemsize": get_dtype_size(spec.dtype)}
        found["content_bytes"] = spec.unpadded_page_size_bytes
    if isinstance(spec, MambaSpec):
        found |= {"shapes": [list(shape) for shape in spec.shapes], "itemsizes": [*map(get_dtype_size, spec.dtypes)]}
        found["content_bytes"] = spec.state_content_size_bytes
    return found


def groups_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's groups for a model, and the bytes of one block of a rank's memory."""
    model = Model(asked, NUM_BLOCKS)
    config, cache = model.config, model.cache
    groups = []
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        mixed = isinstance(spec, UniformTypeKVCacheSpecs)
        layers = [layer_of(name, config) for name in group.layer_names]
        groups.append({"layers": layers, **({"kind": "mixed"} if mixed else described(spec))})
    return {
        "groups": groups,
        "block_bytes": cache.kv_cache_tensors[0].size // cache.num_blocks,
        "kv_heads": config.model_config.get_total_num_kv_heads(),
        "head_size": config.model_config.get_head_size(),
    }


def reason_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what a child of this process finds out, within bounds of time and memory."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
            found = moved(asked) if asked.get("move") else groups_of(asked)
        except BaseException as error:  # whatever vLLM raises is the answer
            found = {"refused": reason_of(error)}
        with os.fdopen(write, "wb") as pipe:
            pipe.write(json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    text, ends_at = b"", time.monotonic() + SECONDS
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, ends_at - time.monotonic()))[0] and (part := pipe.read(1 << 16)):
            text += part
    if time.monotonic() >= ends_at:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(text) if text else {"refused": f"no answer within {SECONDS} seconds and {DATA_BYTES} bytes"}


def serve(connection: socket.socket) -> None:
    """Answer one process of the tests until it goes away."""
    with connection.makefile("r") as questions, connection.makefile("w") as answers:
        for line in questions:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def main(listener: socket.socket, folder: Path) -> None:
    """Answer each process of the tests in a fork of its own, and end with the last of them."""
    prepare()
    children = set[int]()
    while True:
        if select.select([listener], [], [], 0.2)[0]:
            connection, _ = listener.accept()
            if not (child := os.fork()):
                listener.close()
                serve(connection)
                os._exit(0)
            connection.close()
            children.add(child)
        children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
        if children:
            continue
        with (folder / "lock").open("w") as lock:  # nobody connects meanwhile
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not select.select([listener], [], [], 0.0)[0]:
                (folder / "socket").unlink()
                return


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))

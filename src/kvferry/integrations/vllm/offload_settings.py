"""Settings of ``KVFerryOffloadConnector``, its ``kv_connector_extra_config``, validated when the engine starts."""

from typing import Annotated, Literal

import msgspec

Bytes = Annotated[int, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class OffloadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of the offload connector with their defaults."""

    host_bytes: Bytes | str
    """Host memory for stored blocks of all ranks of an engine; a number of bytes, or text such as "8 GiB"."""
    disk_path: str = ""
    """Folder of the disk tier; empty for none. One engine owns it at a time."""
    disk_bytes: Bytes | str = "0"
    pool_master: str = ""
    """host:port of a Mooncake Store's master; empty for no pool."""
    pool_bytes: Bytes | str = "0"
    """Memory that this engine gives to the pool."""
    block_size: int = 0
    """Tokens of a stored block, a whole number of the engine's blocks; 0 for one block of the engine."""
    eviction: Literal["lru", "s3-fifo"] = "lru"
    load_wait_seconds: Seconds = 2.0
    """How long a request waits for blocks that a lower tier brings to host memory."""
    window_interval: int = 0
    """Tokens between the boundaries at which windows and states are stored; 0 for the prompt's end only."""
    layout: str = ""
    model_id: str = ""
    transfer_cores: tuple[int, ...] = ()

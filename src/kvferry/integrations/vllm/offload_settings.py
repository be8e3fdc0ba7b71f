"""Settings of ``KVFerryOffloadConnector``, its ``kv_connector_extra_config``, validated when the engine starts."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvferry.errors import KVFerryError, SettingsError, TierError, raise_all
from kvferry.integrations.vllm.settings import Found, about, converted, invalid_setting
from kvferry.units import parse_bytes

LONGEST_WAIT_SECONDS = 86400
_IN_PLACE = 1
"""Stands for a size that is wrong."""


class OffloadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of the offload connector with their defaults; an empty default stands for what ``unset`` says.

    Sizes are numbers of bytes here; :func:`parse_offload_settings` takes text such as ``"8 GiB"`` too.
    """

    host_bytes: Annotated[
        int,
        msgspec.Meta(gt=0),
        about(
            'Host memory for stored blocks of all ranks of an engine, for example `"8 GiB"`; it is taken when the '
            "engine starts, and on a GPU every rank pins it.",
            unit="bytes",
        ),
    ]
    disk_path: Annotated[
        str,
        about(
            "The folder of the disk tier, which one engine owns at a time; in it each further data-parallel rank has a "
            "folder `dp<rank>`.",
            unit="path",
            unset="none",
        ),
    ] = ""
    disk_bytes: Annotated[
        int,
        msgspec.Meta(ge=0),
        about("With `disk_path`, the most bytes that an engine's folder occupies on disk.", unit="bytes", unset="none"),
    ] = 0
    pool_master: Annotated[
        str,
        about("The address of the master of a Mooncake Store.", unit="host:port", unset="none", page="offload.md"),
    ] = ""
    pool_bytes: Annotated[
        int,
        msgspec.Meta(ge=0),
        about(
            "With `pool_master`, the memory that an engine lends to the pool, at least 16 MiB; each data-parallel rank "
            "is an engine.",
            unit="bytes",
            unset="none",
        ),
    ] = 0
    block_size: Annotated[
        int,
        msgspec.Meta(ge=0),
        about(
            "The tokens of a stored block, a whole number of the engine's blocks.",
            unit="tokens",
            unset="one block of the engine",
        ),
    ] = 0
    loads: Annotated[
        Literal["when-quicker", "always"],
        about(
            "Whether a prefix that a tier has is loaded: when the measured times say that loading is quicker than "
            "computing, or always."
        ),
    ] = "when-quicker"
    load_wait_seconds: Annotated[
        float,
        msgspec.Meta(gt=0, le=LONGEST_WAIT_SECONDS),
        about("How long a request waits for blocks that a lower tier brings to host memory.", unit="seconds"),
    ] = 2.0
    window_interval: Annotated[
        int,
        msgspec.Meta(ge=0),
        about(
            "The tokens between the boundaries at which sliding windows are stored, beside the ends of prompts and "
            "requests, for models that have such windows; a hit ends at a boundary.",
            unit="tokens",
            unset="every block is stored",
        ),
    ] = 0
    model_id: Annotated[
        str,
        about(
            "What names model and weights in place of their digests; it must change with the weights.",
            unset="digests",
            page="decisions/names-of-stored-blocks.md",
        ),
    ] = ""


def parse_offload_settings(extra_config: Mapping[str, Any]) -> OffloadSettings:
    """Return the settings in ``extra_config``.

    Raises :class:`SettingsError`: unknown-setting naming the nearest valid key, and invalid-setting.

    >>> parse_offload_settings({"host_bytes": "8 GiB"}).host_bytes == 8 << 30
    True
    >>> parse_offload_settings({"host_bytes": "8 gigs"})
    Traceback (most recent call last):
    kvferry.errors.SettingsError: host_bytes '8 gigs' is no size. Give a number of bytes, or text such as "8 GiB". \
[invalid-setting]
    """
    found = read_offload_settings(extra_config)
    raise_all(found.errors)
    return found.settings


def read_offload_settings(extra_config: Mapping[str, Any]) -> Found[OffloadSettings]:
    """Return the settings in ``extra_config``, and all that is wrong with them."""
    given, errors, wrong = dict(extra_config), list[KVFerryError](), set[str]()
    for name in ("host_bytes", "disk_bytes", "pool_bytes"):
        if isinstance(given.get(name), str):
            try:
                given[name] = parse_bytes(given[name])
            except ValueError as error:
                remedy = 'Give a number of bytes, or text such as "8 GiB".'
                errors.append(invalid_setting(f"{name} {error}.", remedy))
                wrong.add(name)
                given[name] = _IN_PLACE
    found = converted(given, OffloadSettings, host_bytes=_IN_PLACE)
    found.errors[:0] = errors
    found.wrong.update(wrong)
    for place, size in (("disk_path", "disk_bytes"), ("pool_master", "pool_bytes")):
        found.note([place, size], partial(_check_together, place, size))
    found.note(["pool_master"], _check_master)
    return found


def _check_together(place: str, size: str, settings: OffloadSettings) -> None:
    if bool(getattr(settings, place)) != bool(getattr(settings, size)):
        raise invalid_setting(f"{place} and {size} go together: where the tier is, and how large.", "Set both.")


def _check_master(settings: OffloadSettings) -> None:
    if not settings.pool_master:
        return
    from kvferry.tiers.remote_pool import check_master  # most engines have no pool

    try:
        check_master(settings.pool_master)
    except TierError as error:
        raise SettingsError(error.reason, f"pool_master {error.message}", error.remedy) from error


def disk_folder(settings: OffloadSettings, data_parallel_rank: int) -> Path:
    """Return the folder of this engine's disk tier: each data-parallel rank is an engine.

    >>> disk_folder(OffloadSettings(1, disk_path="/data"), 2).as_posix()
    '/data/dp2'
    """
    folder = Path(settings.disk_path)
    return folder / f"dp{data_parallel_rank}" if data_parallel_rank else folder

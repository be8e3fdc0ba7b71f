"""The kinds of faults of a campaign, by family, and how often each comes."""

import errno
import random
from collections.abc import Callable, Sequence
from functools import partial

from .campaign import Campaign, Injection
from .disk_folder import OF_BLOCKS, OF_FILES, OF_THE_INDEX
from .faulty_os import Fault
from .outcomes import Outcome


def all_kinds(campaign: Campaign) -> dict[str, Injection]:
    """Return what injects a fault, by the name of its kind: family and kind."""
    return {
        **of_reads(campaign),
        **of_writes(campaign),
        **of_folders(campaign),
        **of_starts(campaign),
        **of_kills(campaign),
        **{f"pool: master {how}": partial(campaign.pool_fails, how) for how in ("killed", "stopped")},
    }


def of_reads(campaign: Campaign) -> dict[str, Injection]:
    """Return the faults of reads of blocks."""
    kinds = ("flip", "elsewhere", "lost", "short", "empty", "hang")
    numbers = (errno.EIO, errno.ESTALE)
    return {
        **{f"reads: {what}": _each(campaign.reads_fail, "preadv", what) for what in kinds},
        **{f"reads: {_name(number)}": _each(campaign.reads_fail, "preadv", "error", number) for number in numbers},
        **{
            f"reads: {_name(number)} of open": _each(campaign.opens_fail, "open", "error", number)
            for number in (errno.EMFILE, errno.EIO)
        },
    }


def of_writes(campaign: Campaign) -> dict[str, Injection]:
    """Return the faults of writes of blocks and of their headers, and of disks that are full."""
    kinds = ("flip", "elsewhere", "lost", "cut", "short", "hang")
    numbers = (errno.EIO, errno.EROFS)
    full = (errno.ENOSPC, errno.EDQUOT)
    return {
        **{f"writes: {what}": _each(campaign.writes_fail, "pwritev", what) for what in kinds},
        **{f"writes: {_name(number)}": _each(campaign.writes_fail, "pwritev", "error", number) for number in numbers},
        **{f"headers: {what}": _each(campaign.headers_fail, "pwrite", what) for what in (*kinds[:1], *kinds[2:])},
        "headers: EIO": _each(campaign.headers_fail, "pwrite", "error"),
        **{f"disk full: {_name(number)}": _each(campaign.writes_fail, "pwritev", "error", number) for number in full},
        **{
            f"disk full: {_name(number)} of a new segment": _each(
                campaign.segments_cannot_be_made, "posix_fallocate", "error", number
            )
            for number in (errno.ENOSPC, errno.EIO)
        },
        "disk full: limit of a file's length": campaign.files_limited,
        "disk full: file system": campaign.file_system_full,
    }


def of_folders(campaign: Campaign) -> dict[str, Injection]:
    """Return the damage behind the tier's back."""
    return {
        **{f"blocks: {name}": partial(campaign.blocks_damaged, damage) for name, damage in OF_BLOCKS.items()},
        **{f"files: {name}": partial(campaign.files_damaged, damage) for name, damage in OF_FILES.items()},
        **{f"index: {name}": partial(campaign.index_damaged, damage) for name, damage in OF_THE_INDEX.items()},
        "index: older than the blocks": campaign.index_older_than_blocks,
    }


def of_starts(campaign: Campaign) -> dict[str, Injection]:
    """Return what a new life finds other than it was left."""
    return {
        **{
            f"index: reads {what}": _each(campaign.index_cannot_be_read, "pread", what)
            for what in ("flip", "short", "error")
        },
        "index: EMFILE of open": _each(campaign.index_cannot_be_read, "open", "error", errno.EMFILE),
        "cap: smaller at a start": campaign.smaller_cap,
    }


def of_kills(campaign: Campaign) -> dict[str, Injection]:
    """Return the ways in which the engine is killed."""
    return {
        "SIGKILL: at some time of writes": partial(campaign.killed, None),
        "SIGKILL: in the write of a block": _each(campaign.killed, "pwritev", "kill"),
        "SIGKILL: in the write of a header": _each(campaign.killed, "pwrite", "kill"),
        "SIGKILL: while a segment is made": _each(campaign.killed, "posix_fallocate", "kill"),
    }


WEIGHTS = {
    "SIGKILL: at some time of writes": 3,
    "SIGKILL: in the write of a block": 3,
    "SIGKILL: in the write of a header": 2,
}
"""How often kinds come that come more than once."""


def is_of_the_pool(kind: str) -> bool:
    """Return whether the fault is one of the pool's master."""
    return kind.startswith("pool: ")


def schedule(kinds: Sequence[str], number: int, seed: int) -> list[str]:
    """Return so many kinds in a random order, all equally often (but for a rest), those of the pool at the end.

    >>> [schedule(["a", "pool: b", "c"], 6, seed).count("a") for seed in range(4)]
    [2, 2, 2, 2]
    >>> schedule(["a", "pool: b", "c"], 6, seed=1)[-2:]
    ['pool: b', 'pool: b']
    """
    generator = random.Random(seed)
    once = [kind for kind in kinds for _ in range(WEIGHTS.get(kind, 1))]
    generator.shuffle(once)
    chosen = [once[place % len(once)] for place in range(number)]
    generator.shuffle(chosen)
    return sorted(chosen, key=is_of_the_pool)


def _each(inject: Callable[[Fault, Outcome], None], call: str, what: str, number: int = errno.EIO) -> Injection:
    return lambda outcome: inject(Fault(call, what, number), outcome)


def _name(number: int) -> str:
    return errno.errorcode[number]

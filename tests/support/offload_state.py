"""What the offload connector's scheduler and its tiers have under way, and have counted, as plain data."""

from typing import Any

from kvferry.tiers.lower_copies import LowerCopies
from kvferry.tiers.stack import Stack


def role_state(role: Any) -> dict[str, Any]:
    """Return the state of an ``OffloadScheduler``; at rest every count but those of ``counts`` is 0."""
    stack = role._stack
    return {
        "start": role._start.state.name.lower(),
        "requests": len(role._requests),
        "promised": len(role._loads.promised),
        "loads": sorted(role._loads.jobs),
        "stores": len(role._stores.jobs),
        "kept_blocks": role._stores.kept.num_kept,
        "counts": dict(role._counts),
        "tiers": stack_state(stack, role._clock()) if stack else {},
    }


def stack_state(stack: Stack, now: float) -> dict[str, Any]:
    """Return the state of host memory and of each lower tier, and how many blocks each request has pinned."""
    return {
        "host_memory": stack._host.snapshot(),
        "lower": {copies.name: _lower_state(copies, now) for copies in stack._lower},
        "requests": {name: {"pinned": len(asker.pinned)} for name, asker in sorted(stack._askers.items())},
        "blocks_in_chunks": len(stack._chunks),
        "counts": dict(stack._counts),
    }


def is_idle(stack: Stack) -> bool:
    """Return whether ``poll`` has nothing to do until the next call of another verb."""
    waits = any(not asker.is_loading for asker in stack._askers.values())
    return not waits and not any(
        copies._queues or copies._prefetches or copies._to_write or copies._promotions or copies._writes
        for copies in stack._lower
    )


def _lower_state(copies: LowerCopies, now: float) -> dict[str, Any]:
    return {
        **copies.totals,
        "failures": {reason.value: count for reason, count in copies.failures.items() if count},
        "refused_above": {reason.value: count for reason, count in copies.refused_above.items() if count},
        "queued_chunks": sum(map(len, copies._queues.values())) + len(copies._prefetches),
        "blocks_to_write": len(copies._to_write),
        "promotions": list(copies._promotions),
        "writes": list(copies._writes),
        "stuck_blocks": len(copies.stuck),
        "is_suspended": copies.is_suspended(now),
        "is_set_aside": copies._tier.is_set_aside,
    }

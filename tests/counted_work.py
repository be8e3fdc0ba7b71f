"""Counts the Python lines of an operation, so that a loop over descriptors or blocks is found without timing."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

CONTAINERS = 100


def lines_of(work: Callable[[], object]) -> int:
    """Count the lines of Python that run, each turn of a loop anew."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    # A collection that falls into the work would add the lines of the callbacks of Hypothesis.
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def containers_of(work: Callable[[], object]) -> int:
    """Count in hundreds the lists, tuples and the like that were alive at once, those that C code makes included.

    >>> containers_of(lambda: list(zip(range(1000), range(1000)))) >= 8, containers_of(lambda: list(range(1000)))
    (True, 0)
    """
    count = 0

    def counted(phase: str, info: dict[str, int]) -> None:
        nonlocal count
        count += phase == "start"

    gc.collect()
    thresholds = gc.get_threshold()
    gc.callbacks.append(counted)
    gc.set_threshold(CONTAINERS, 1 << 30, 1 << 30)
    try:
        work()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(counted)
    return count

"""What a lowered list amounts to, in a few numbers."""

from dataclasses import dataclass

import numpy as np

from kvferry.plan.transfer_plan import Descriptors


@dataclass(frozen=True)
class Summary:
    """One pair's list: how many descriptors, bytes, and runs of which length.

    ``run_lengths`` are (length in bytes, how many), longest first. Str gives the run-length encoded form:

    >>> str(Summary(strategy="direct", descriptors=3, bytes=20, run_lengths=((8, 2), (4, 1))))
    'direct: 3 descriptors, 20 bytes, 2x8 1x4'
    """

    strategy: str
    descriptors: int
    bytes: int
    run_lengths: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        runs = " ".join(f"{count}x{length}" for length, count in self.run_lengths)
        return f"{self.strategy}: {self.descriptors} descriptors, {self.bytes} bytes, {runs}"


def summarize(descriptors: Descriptors) -> Summary:
    """Return the summary of a lowered list.

    >>> summarize(np.array([[0, 100, 8], [16, 200, 8]], dtype=np.uint64)).run_lengths
    ((8, 2),)
    """
    lengths, counts = np.unique(descriptors[:, 2], return_counts=True)
    runs = tuple(zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True))
    return Summary("direct", len(descriptors), int(descriptors[:, 2].sum()), runs)

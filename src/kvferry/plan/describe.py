"""Text about a plan: its descriptors in a few numbers, and its choice of strategy."""

from dataclasses import dataclass

import numpy as np

from kvferry.arrays import Descriptors
from kvferry.plan.staging.strategy import Choice, Prediction
from kvferry.units import format_bytes


@dataclass(frozen=True)
class Summary:
    """The descriptors of one pair of ranks: their number, bytes, and lengths.

    ``run_lengths`` are (length in bytes, number of runs), longest first. ``str`` is run-length encoded:

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


def describe_choice(choice: Choice) -> str:
    """Return a pair's chosen and rejected strategies with their predicted times, one per line.

    >>> from kvferry.plan.staging.strategy import TYPICAL_COSTS, Strategy
    >>> direct, scatter = Prediction(Strategy.DIRECT, 4096, 8 << 20), Prediction(Strategy.SCATTER, 256, 8 << 20)
    >>> costs = TYPICAL_COSTS["nixl"]
    >>> print(describe_choice(Choice(scatter.timed(costs), (direct.timed(costs),), "the stage is small.", costs,
    ...     2048)))
    for 2048 tokens in scattered blocks over nixl:
      chosen   scatter    1.12 ms: 256 descriptors, 8.0 MiB on the wire
      rejected direct     9.57 ms: 4096 descriptors, 8.0 MiB on the wire
      excluded scatter the stage is small.
    """
    lines = [f"for {choice.num_tokens} tokens in scattered blocks over {choice.costs.transport}:"]
    lines.append(f"  chosen   {_describe(choice.chosen)}")
    lines += [f"  rejected {_describe(prediction)}" for prediction in choice.rejected]
    if choice.impossible:
        lines.append(f"  excluded scatter {choice.impossible}")
    return "\n".join(lines)


def _describe(prediction: Prediction) -> str:
    what = f"{prediction.num_descriptors} descriptors, {format_bytes(prediction.num_bytes)} on the wire"
    if prediction.num_copies:
        what += f", then {prediction.num_copied_runs} runs in {prediction.num_copies} copies"
    if prediction.gap_bytes:
        what += f", reads include gaps of up to {format_bytes(prediction.gap_bytes)}"
    return f"{prediction.strategy:7} {prediction.seconds * 1e3:7.2f} ms: {what}"

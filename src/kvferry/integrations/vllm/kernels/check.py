"""Does a kernel read and write a layout? Run the kernel, and compare with its results on the per-layer layout.

vLLM gives its kernels strided views of one buffer. A kernel that assumes dense pages returns wrong numbers and no
error, so the check compares results: the bytes that the kernel writes, read back through the engine's views, and the
attention that it computes from a cache with known bytes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

import msgspec
import torch

from kvferry.layout.named_layouts import NamedLayout

NUM_BLOCKS = 5
BLOCK_IDS = (4, 1)  # of the one request: without block 0 and not ascending, so that a wrong stride shows
# The same kernel on the same numbers; only the order of its sums may differ.
TOLERANCE, TOLERANCE_OF_SHORT_TYPES = 1e-4, 2e-2
EXACT = 0.0


class Outcome(StrEnum):
    """The result of a kernel on a layout; a ``NOT_CHECKED`` kernel fails even on its per-layer layout."""

    PASSES = "passes"
    WRONG = "wrong"
    REFUSED = "refused"
    NOT_CHECKED = "not checked"


class KernelCase(msgspec.Struct, frozen=True):
    """A kernel: vLLM's name of its back end, the cache's element type, elements per head, tokens per block."""

    backend: str
    dtype: str
    head_size: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.backend} ({self.dtype}, head size {self.head_size}, block size {self.block_size})"


class Verdict(msgspec.Struct, frozen=True):
    """How a kernel's answers on ``layout`` compare with its answers on the per-layer layout.

    ``difference`` is the largest difference of two elements, ``found`` says where it is.

    >>> case = KernelCase("CPU_ATTN", "float32", 64, 128)
    >>> print(Verdict(case, NamedLayout.BHLNC, Outcome.WRONG, 2.5, "attention of a prompt differs by 2.5"))
    CPU_ATTN (float32, head size 64, block size 128) on BHLNC: wrong, attention of a prompt differs by 2.5
    """

    case: KernelCase
    layout: NamedLayout
    outcome: Outcome
    difference: float
    found: str = ""

    @property
    def fails(self) -> bool:
        """Whether the layout must not be used with this kernel."""
        return self.outcome in (Outcome.WRONG, Outcome.REFUSED)

    def __str__(self) -> str:
        found = f", {self.found}" if self.found else ""
        return f"{self.case} on {self.layout}: {self.outcome}{found}"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine: tokens ``first`` to ``end`` of a request, in blocks of ``block_size`` tokens."""

    name: str
    first: int
    end: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        """New tokens of this step."""
        return self.end - self.first

    def slots(self) -> list[int]:
        """Return the slot of each new token, counted over all blocks.

        >>> Step("the next token", 6, 7, block_size=4).slots()
        [6]
        """
        positions = range(self.first, self.end)
        return [
            BLOCK_IDS[position // self.block_size] * self.block_size + position % self.block_size
            for position in positions
        ]


class Kernel(Protocol):
    """The cache write and the attention of a few layers, numbered from 0."""

    def write(self, layer: int, cache: torch.Tensor, step: Step) -> None:
        """Write the keys and values of the step's tokens into ``cache``, a ``[B, H, N, C]`` view."""

    def attend(self, layer: int, cache: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Return the attention of the step's tokens; None where the kernel does not read the cache for it."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A kernel's results on its per-layer layout: the caches before, and after each step caches and attention."""

    filler: list[torch.Tensor]
    written: list[list[torch.Tensor]]
    attended: list[list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison: the largest difference, and what is wrong with it."""

    where: str
    difference: float
    outcome: Outcome
    complaint: str = ""


def compare_layouts(
    kernel: Kernel,
    case: KernelCase,
    allocate: Callable[[NamedLayout], Sequence[torch.Tensor]],
    layouts: Sequence[NamedLayout],
    reference: NamedLayout = NamedLayout.LBHNC,
) -> Iterator[Verdict]:
    """Yield a verdict for each of ``layouts``.

    ``allocate`` returns the views of ``NUM_BLOCKS`` blocks of each layer in a new buffer. Where the kernel fails on
    ``reference`` every verdict is ``NOT_CHECKED``.
    """
    steps = steps_of(case.block_size)
    with torch.no_grad():
        try:
            recording = _record(kernel, allocate(reference), steps)
        except Exception as error:
            found = f"fails on {reference} already: {_first_words(error)}"
            yield from (Verdict(case, layout, Outcome.NOT_CHECKED, 0.0, found) for layout in layouts)
            return
        for layout in layouts:
            yield _judge(case, layout, list(_replay(kernel, partial(allocate, layout), steps, recording, case)))


def steps_of(block_size: int) -> tuple[Step, ...]:
    """Return a prompt of one and a half blocks and the token after it.

    >>> [(step.first, step.end) for step in steps_of(64)]
    [(0, 96), (96, 97)]
    """
    prompt = block_size + block_size // 2
    return (
        Step("of a prompt", 0, prompt, block_size),
        Step("of the next token", prompt, prompt + 1, block_size),
    )


def _record(kernel: Kernel, views: Sequence[torch.Tensor], steps: Sequence[Step]) -> Recording:
    # Random numbers: zeros would hide bytes that were not written.
    recording = Recording([random_tensor(layer, view.shape, view) for layer, view in enumerate(views)], [], [])
    _fill(views, recording.filler)
    for step in steps:
        recording.written.append([view.clone() for view in _write(kernel, views, step)])
        recording.attended.append(_attend(kernel, views, step))
        if not all(bool(torch.isfinite(answer).all()) for answer in recording.attended[-1]):
            raise ArithmeticError(f"the attention {step.name} is not finite")
    return recording


def _replay(
    kernel: Kernel,
    allocate: Callable[[], Sequence[torch.Tensor]],
    steps: Sequence[Step],
    recording: Recording,
    case: KernelCase,
) -> Iterator[Finding]:
    """Compare step by step; correct wrong bytes after each write, so that each write and attention is judged alone."""
    try:
        views = allocate()
    except Exception as error:
        yield Finding("allocation", EXACT, Outcome.REFUSED, _first_words(error))
        return
    tolerance = TOLERANCE if case.dtype == "float32" else TOLERANCE_OF_SHORT_TYPES
    _fill(views, recording.filler)
    for step, written, attended in zip(steps, recording.written, recording.attended, strict=True):
        yield _compare(f"cache write {step.name}", written, partial(_write, kernel, views, step), EXACT)
        _fill(views, written)
        yield _compare(f"attention {step.name}", attended, partial(_attend, kernel, views, step), tolerance)
        _fill(views, written)


def _judge(case: KernelCase, layout: NamedLayout, findings: list[Finding]) -> Verdict:
    outcomes = {finding.outcome for finding in findings}
    outcome = next(each for each in (Outcome.WRONG, Outcome.REFUSED, Outcome.PASSES) if each in outcomes)
    places: dict[str, list[str]] = {}
    for finding in findings:
        if finding.complaint:
            places.setdefault(finding.complaint, []).append(finding.where)
    found = "; ".join(f"{', '.join(where)}: {what}" for what, where in places.items())
    return Verdict(case, layout, outcome, max(finding.difference for finding in findings), found)


def _compare(
    where: str, expected: Sequence[torch.Tensor], run: Callable[[], Sequence[torch.Tensor]], allowed: float
) -> Finding:
    try:
        found = run()
    except Exception as error:  # a kernel may raise any error, and that is the finding
        return Finding(where, EXACT, Outcome.REFUSED, _first_words(error))
    difference = max((_largest_difference(*pair) for pair in zip(expected, found, strict=True)), default=EXACT)
    if difference > allowed:
        return Finding(where, difference, Outcome.WRONG, f"differs by {difference:.3g}")
    return Finding(where, difference, Outcome.PASSES)


def _write(kernel: Kernel, views: Sequence[torch.Tensor], step: Step) -> Sequence[torch.Tensor]:
    """Write every layer before any is compared, so that layers which overlap show."""
    for layer, view in enumerate(views):
        kernel.write(layer, view, step)
    return views


def _attend(kernel: Kernel, views: Sequence[torch.Tensor], step: Step) -> list[torch.Tensor]:
    answers = [kernel.attend(layer, view, step) for layer, view in enumerate(views)]
    return [answer for answer in answers if answer is not None]


def _fill(views: Sequence[torch.Tensor], contents: Sequence[torch.Tensor]) -> None:
    for view, content in zip(views, contents, strict=True):
        view.copy_(content)


def random_tensor(seed: int, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return normal numbers, the same for the same seed and shape, of the type and on the device of ``like``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(like)


def _largest_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the largest difference of two elements; NaN and infinity count as the largest number of the type."""
    if torch.equal(expected, found):
        return EXACT
    difference = (expected.float() - found.float()).abs()
    limit = torch.finfo(difference.dtype).max
    return float(difference.nan_to_num(nan=limit, posinf=limit).max())


def _first_words(error: Exception) -> str:
    """Return an error's text up to the first bracket or full stop: PyTorch's texts are long."""
    words = re.split(r" \(|\.( |$)", (str(error).strip().splitlines() or [""])[0])[0]
    return f"{type(error).__name__}: {words}"

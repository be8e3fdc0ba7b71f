"""What faults did, and tables of it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """What a fault did. ``met``: calls that met the fault, or blocks and files that were found damaged."""

    kind: str
    met: int = 0
    requests: int = 0
    tokens: int = 0
    cached: int = 0
    loaded: int = 0
    failed_blocks: Counter[str] = field(default_factory=Counter)
    wrong_tokens: int = 0
    wrong_blocks: int = 0
    failed_requests: int = 0
    lives: int = 0
    over_cap: int = 0
    kept: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether everything held that must hold."""
        return not (self.wrong_tokens or self.wrong_blocks or self.failed_requests or self.over_cap or self.kept)


def table(outcomes: Sequence[Outcome], by: Callable[[Outcome], str]) -> str:
    """Return the outcomes in Markdown, added up by kind or family."""
    names = (
        "faults", "met", "requests", "engine starts", "prompt tokens loaded", "blocks loaded", "blocks failed",
        "wrong tokens", "wrong blocks", "failed requests", "over cap", "left behind",
    )  # fmt: skip
    rows = [["kind", *names], ["---"] * (len(names) + 1)]
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(by(outcome), []).append(outcome)
    for name, group in [*sorted(groups.items()), ("all", list(outcomes))]:
        rows.append([name, *map(str, _added(group))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _added(group: Sequence[Outcome]) -> list[Any]:
    share = sum(one.cached for one in group) / max(1, sum(one.tokens for one in group))
    return [
        len(group),
        sum(one.met > 0 for one in group),
        sum(one.requests for one in group),
        sum(one.lives for one in group),
        f"{100 * share:.0f} %",
        sum(one.loaded for one in group),
        sum(sum(one.failed_blocks.values()) for one in group),
        sum(one.wrong_tokens for one in group),
        sum(one.wrong_blocks for one in group),
        sum(one.failed_requests for one in group),
        sum(one.over_cap for one in group),
        sum(bool(one.kept) for one in group),
    ]


def reasons(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return how many blocks failed, by reason."""
    return dict(sum((outcome.failed_blocks for outcome in outcomes), Counter[str]()))


def family(outcome: Outcome) -> str:
    """Return the family of a fault's kind."""
    return outcome.kind.partition(":")[0]

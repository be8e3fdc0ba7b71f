"""A tiny router and the checks that every handoff must pass."""

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from .engine_pool import Engine, EnginePool, Reference, fresh_salt

RELEASE_SECONDS = 2.0
NOT_RELEASED = ("nobody read or renewed", "came to nothing", "failed to load", "cannot be loaded")


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine, by name."""

    name: str
    prefill: str
    decode: str
    transport: str = "cma"

    @property
    def model(self) -> str:
        return self.prefill.partition("-")[0]


PAIRS = (
    Pair("gqa-1-1", "gqa-tp1", "gqa-tp1-other"),
    Pair("gqa-2-1", "gqa-tp2", "gqa-tp1"),
    Pair("gqa-1-2", "gqa-tp1", "gqa-tp2"),
    Pair("gqa-2-2", "gqa-tp2-other", "gqa-tp2"),
    Pair("gqa-4-2", "gqa-tp4", "gqa-tp2-other"),
    Pair("gqa-2-1-nixl", "gqa-tp2", "gqa-tp1-nixl", "nixl"),
    Pair("mla-1-1", "mla-tp1", "mla-tp1-other"),
    Pair("mla-2-1", "mla-tp2", "mla-tp1"),
)


GQA_PAIRS = tuple(pair.name for pair in PAIRS if pair.model == "gqa")
MLA_PAIRS = tuple(pair.name for pair in PAIRS if pair.model == "mla")


def for_pairs(*names: str) -> Any:
    """Parametrize a test over pairs (all of them without names); the argument is ``pair``."""
    chosen = [pair for pair in PAIRS if not names or pair.name in names]
    assert len(chosen) == (len(names) or len(PAIRS))
    params = [pytest.param(pair, id=pair.name, marks=pytest.mark.engines(pair.prefill, pair.decode)) for pair in chosen]
    return pytest.mark.parametrize("pair", params)


@dataclass(frozen=True)
class Handoffs:
    """One pair of running engines behind a tiny router."""

    pair: Pair
    prefill: Engine
    decode: Engine

    @classmethod
    def of(cls, pair: Pair, pool: EnginePool) -> "Handoffs":
        return cls(pair, pool.running[pair.prefill], pool.running[pair.decode])

    def send(self, prompt: Sequence[int], max_tokens: int = 8, salt: str | None = None, **more: Any) -> list[list[int]]:
        """Send one prompt through both engines; return the tokens of every sample."""
        salt = salt or fresh_salt()
        return self.decode.decode(prompt, self.prefill.prefill(prompt, salt), max_tokens, salt, **more)

    def send_all(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **more: Any) -> list[list[list[int]]]:
        """Send prompts through both engines, all at once."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.send(prompt, max_tokens, **more), prompts))

    def check_released(self, logs_before: Sequence[int]) -> float:
        """Wait until neither engine uses a block; return the seconds it took. Nothing may have expired or failed."""
        asked_at = time.monotonic()
        usages = [1.0]
        while any(usages) and time.monotonic() - asked_at < RELEASE_SECONDS:
            usages = [self.prefill.usage(), self.decode.usage()]
        seconds = time.monotonic() - asked_at
        assert not any(usages), f"KV cache usage {usages} is left after {seconds:.1f} s"
        for engine, start in zip((self.prefill, self.decode), logs_before, strict=True):
            for text in NOT_RELEASED:
                assert text not in engine.log()[start:], f"{engine.name} logged {text!r}"
        return seconds

    @contextmanager
    def faults(self, plan: dict[str, Any]) -> Iterator[None]:
        """Let the decode engine's transports err as ``plan`` says."""
        self.decode.set_faults(plan)
        try:
            yield
        finally:
            self.decode.set_faults(None)

    def log_ends(self) -> list[int]:
        """Return how long both logs are now."""
        return [len(self.prefill.log()), len(self.decode.log())]


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Return a prompt that no other seed shares a prefix with."""
    generator = random.Random(seed)
    return [generator.randrange(2, 2000) for _ in range(num_tokens)]


def random_prompts(seed: int, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Return prompts whose lengths are spread evenly on a logarithmic scale, in a random order."""
    ratio = (longest / shortest) ** (1 / max(1, count - 1))
    lengths = [round(shortest * ratio**index) for index in range(count)]
    random.Random(seed).shuffle(lengths)
    return [random_prompt(seed * 1000 + index, length) for index, length in enumerate(lengths)]


def check_tokens(
    answers: Sequence[Sequence[Sequence[int]]], model: str, prompts: Sequence[Sequence[int]], reference: Reference
) -> None:
    """Every sample of every answer must be what an engine computes that never received a cache."""
    max_tokens = len(answers[0][0])
    expected = reference.tokens(model, prompts, max_tokens)
    different = [
        len(prompt)
        for prompt, answer, tokens in zip(prompts, answers, expected, strict=True)
        if any(sample != tokens for sample in answer)
    ]
    assert not different, (
        f"tokens differ for {len(different)} of {len(prompts)} prompts, of lengths {sorted(different)}"
    )


def submission_bytes(handoffs: Handoffs, num_tokens: int) -> int:
    """Return the bytes that one decode rank reads from one prefill rank for a prompt, by the models' shapes.

    GQA pages are moved whole; 8 layers and 4 heads of 64 keys and 64 values. MLA: 4 layers, 576 elements a token.
    """
    if handoffs.pair.model == "mla":
        return 4 * num_tokens * 576 * 4
    num_heads = 4 // max(handoffs.prefill.tp, handoffs.decode.tp)
    block_size = handoffs.decode.block_size
    return -(-num_tokens // block_size) * 8 * num_heads * block_size * 128 * 4

"""A tiny router and the checks that every handoff must pass."""

import http.client
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvferry.harness.launch import port_is_free

from .engine_pool import (
    MLA_MODELS,
    OWN_ADAPTER,
    ROUNDED_MODELS,
    ROUNDED_STEP,
    Engine,
    EnginePool,
    Reference,
    RequestFailed,
    described,
    fresh_salt,
)

RELEASE_SECONDS = 2.0
NOT_RELEASED = (
    "no decode engine came within",
    "the decode engine has not renewed",
    "was not acknowledged",
    "failed to load",
    "cannot be loaded",
)

HYBRIDS = ("gemma", "gemma3n", "gemma4", "gptoss", "granite", "qwennext")
PLAIN_SHAPES = {"six": (6, 6), "mqa": (8, 1)}
"""Layers and KV heads of models with one cache group, where these are not 8 and 4."""


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine, by name."""

    name: str
    prefill: str
    decode: str
    transport: str = "cma"
    in_matrix: bool = False
    """Whether the whole set of tests runs for this pair with KVFERRY_MATRIX=1 only."""

    @property
    def model(self) -> str:
        return self.prefill.partition("-")[0]

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has several cache groups."""
        return self.model in HYBRIDS

    @property
    def is_rounded(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.model in ROUNDED_MODELS

    @property
    def is_compared(self) -> bool:
        """Whether one engine alone computes the same tokens: in bfloat16 only engines of equally many ranks do."""
        sizes = [described(name)[1].get("tensor_parallel_size", 1) for name in (self.prefill, self.decode)]
        return not self.is_rounded or sizes[0] == sizes[1]

    @property
    def is_mla(self) -> bool:
        return self.model in MLA_MODELS


PAIRS = (
    Pair("gqa-1-1", "gqa-tp1", "gqa-tp1-other"),
    Pair("gqa-2-1", "gqa-tp2", "gqa-tp1"),
    Pair("gqa-1-2", "gqa-tp1", "gqa-tp2"),
    Pair("gqa-2-2", "gqa-tp2-other", "gqa-tp2"),
    Pair("gqa-4-2", "gqa-tp4", "gqa-tp2-other", in_matrix=True),
    Pair("gqa-2-1-nixl", "gqa-tp2", "gqa-tp1-nixl", "nixl"),
    Pair("mla-1-1", "mla-tp1", "mla-tp1-other"),
    Pair("mla-2-1", "mla-tp2", "mla-tp1"),
    Pair("mla-1-2", "mla-tp1", "mla-tp2", in_matrix=True),
    Pair("gqa-4-1", "gqa-tp4", "gqa-tp1", in_matrix=True),
    Pair("gqa-2-1-mooncake", "gqa-tp2-mooncake", "gqa-tp1-mooncake", "mooncake", in_matrix=True),
    Pair("gqa-dp2-1", "gqa-dp2", "gqa-tp1", in_matrix=True),
    Pair("gqa-1-dp2", "gqa-tp1", "gqa-dp2", in_matrix=True),
    Pair("gqa-pp2-1", "gqa-pp2", "gqa-tp1"),
    Pair("gqa-1-pp2", "gqa-tp1", "gqa-pp2", in_matrix=True),
    Pair("gqa-pp2x2-2", "gqa-pp2x2", "gqa-tp2", in_matrix=True),
    Pair("fp8-2-1", "fp8-tp2", "fp8-tp1", in_matrix=True),
    Pair("gqa-64-128", "gqa-block64", "gqa-tp1", in_matrix=True),
    Pair("gqa-128-64", "gqa-tp1", "gqa-block64"),
    Pair("gemma-2-1", "gemma-tp2", "gemma-tp1"),
    Pair("gemma-1-1", "gemma-tp1", "gemma-tp1-other", in_matrix=True),
    Pair("gemma-pp2-1", "gemma-pp2", "gemma-tp1", in_matrix=True),
    Pair("gemma-1-pp2", "gemma-tp1", "gemma-pp2", in_matrix=True),
    Pair("gemma-1-2", "gemma-tp1", "gemma-tp2", in_matrix=True),
    # The block of attention is as long as a page must be to hold a state: other for each tensor-parallel size.
    Pair("granite-1-2", "granite-tp1", "granite-tp2"),
    Pair("granite-1-1", "granite-tp1", "granite-tp1-other", in_matrix=True),
    Pair("granite-2-1", "granite-tp2", "granite-tp1", in_matrix=True),
    Pair("deepseek-2-1", "deepseek-tp2", "deepseek-tp1", in_matrix=True),
    # Three ranks of two heads and two of three: ranges cut across one another.
    Pair("six-3-2", "six-tp3", "six-tp2", in_matrix=True),
    Pair("six-3-1", "six-tp3", "six-tp1", in_matrix=True),
    Pair("six-1-3", "six-tp1", "six-tp3", in_matrix=True),
    Pair("mqa-2-1", "mqa-tp2", "mqa-tp1", in_matrix=True),
    Pair("mqa-1-2", "mqa-tp1", "mqa-tp2", in_matrix=True),
    Pair("lora-2-1", "lora-tp2", "lora-tp1", in_matrix=True),
    Pair("gemma3n-2-1", "gemma3n-tp2", "gemma3n-tp1", in_matrix=True),
    Pair("gemma4-2-1", "gemma4-tp2", "gemma4-tp1", in_matrix=True),
    Pair("gptoss-2-1", "gptoss-tp2", "gptoss-tp1", in_matrix=True),
    Pair("qwennext-1-1", "qwennext-tp1", "qwennext-tp1-other", in_matrix=True),
    Pair("qwennext-1-2", "qwennext-tp1", "qwennext-tp2", in_matrix=True),
    Pair("qwennext-2-1", "qwennext-tp2", "qwennext-tp1", in_matrix=True),
)
# The router sends to both engines at once.
CONCURRENT_PAIRS = (
    Pair("concurrent-1-1", "gqa-tp1", "gqa-tp1-next"),
    Pair("concurrent-2-1", "gqa-tp2", "gqa-tp1"),
    Pair("concurrent-1-2", "gqa-tp1", "gqa-tp2"),
    Pair("concurrent-chunked", "gqa-chunked", "gqa-tp1"),
    Pair("concurrent-layers", "gqa-layers", "gqa-tp2"),
    Pair("concurrent-compiled", "gqa-compiled", "gqa-tp1", in_matrix=True),
    Pair("concurrent-preempted", "gqa-small", "gqa-tp1", in_matrix=True),
    Pair("concurrent-nixl", "gqa-tp2", "gqa-tp1-nixl", "nixl", in_matrix=True),
    Pair("concurrent-mooncake", "gqa-tp2-mooncake", "gqa-tp1-mooncake", "mooncake", in_matrix=True),
    Pair("concurrent-gemma-2-1", "gemma-chunked", "gemma-tp1", in_matrix=True),
    Pair("concurrent-gemma-layers", "gemma-layers", "gemma-chunked", in_matrix=True),
    Pair("concurrent-granite-2-1", "granite-tp2", "granite-tp1", in_matrix=True),
    Pair("concurrent-granite-1-2", "granite-tp1", "granite-tp2", in_matrix=True),
    Pair("concurrent-mla-2-1", "mla-tp2", "mla-tp1", in_matrix=True),
    Pair("concurrent-gemma4-2-1", "gemma4-chunked", "gemma4-tp1", in_matrix=True),
    Pair("concurrent-gptoss-2-1", "gptoss-chunked", "gptoss-tp1", in_matrix=True),
)
COMPARED_PAIRS = tuple(pair.name for pair in PAIRS if pair.is_compared)
ALL_PAIRS = bool(os.environ.get("KVFERRY_MATRIX"))


def over_pairs(pairs: Sequence[Any], engines: Callable[[Any], Sequence[str]]) -> Any:
    """Parametrize a test over ``pairs``, which need ``engines``; the argument is ``pair``.

    Only ``make test-matrix`` runs the pairs of the matrix.
    """

    def marks(pair: Any) -> list[pytest.MarkDecorator]:
        return [pytest.mark.engines(*engines(pair)), *([pytest.mark.matrix] if pair.in_matrix else [])]

    return pytest.mark.parametrize("pair", [pytest.param(pair, id=pair.name, marks=marks(pair)) for pair in pairs])


def for_pairs(*names: str) -> Any:
    """Parametrize a test over the pairs named, or over all; the argument is ``pair``."""
    named = [pair for pair in PAIRS if pair.name in names] if names else PAIRS
    assert not names or len(named) == len(names)
    return over_pairs(named, lambda pair: (pair.prefill, pair.decode))


@dataclass(frozen=True)
class Handoffs:
    """One pair of running engines behind a tiny router."""

    pair: Pair
    prefill: Engine
    decode: Engine

    @classmethod
    def of(cls, pair: Pair, pool: EnginePool) -> "Handoffs":
        return cls(pair, pool.running[pair.prefill], pool.running[pair.decode])

    @property
    def is_plain(self) -> bool:
        """Whether there is one cache group, in blocks of one size."""
        return not self.pair.is_hybrid and self.prefill.block_size == self.decode.block_size

    def send(self, prompt: Sequence[int], max_tokens: int = 8, salt: str | None = None, **more: Any) -> list[list[int]]:
        """Send one prompt through both engines; return the tokens of every sample."""
        salt = salt or fresh_salt()
        return self.decode.decode(prompt, self.prefill.prefill(prompt, salt), max_tokens, salt, **more)

    def send_all(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **more: Any) -> list[list[list[int]]]:
        """Send prompts through both engines, all at once; one by one where rounding depends on the others."""
        with ThreadPoolExecutor(1 if self.pair.is_rounded else len(prompts)) as threads:
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
            lines = [line for line in engine.log()[start:].splitlines() if not _is_of_a_killed_engine(line)]
            for text in NOT_RELEASED:
                assert not any(text in line for line in lines), f"{engine.name} logged {text!r}"
        return seconds

    @contextmanager
    def faults(self, plan: dict[str, Any]) -> Iterator[None]:
        """Let the prefill engine's transports err as ``plan`` says; the decode engine compares no digests meanwhile."""
        self.decode.set_faults({})
        self.prefill.set_faults(plan)
        try:
            yield
        finally:
            self.prefill.set_faults(None)
            self.decode.set_faults(None)

    def log_ends(self) -> list[int]:
        """Return how long both logs are now."""
        return [len(self.prefill.log()), len(self.decode.log())]


def _is_of_a_killed_engine(line: str) -> bool:
    """Return whether a line says that an engine does not answer which a former test has killed."""
    found = re.search(r" to 127\.0\.0\.1:(\d+) was not acknowledged", line)
    return found is not None and port_is_free(int(found[1]))


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


FIRST_WAVE = random_prompts(seed=1, count=32, shortest=5, longest=2000)
# Of 1023 tokens the last would move a block out of a window of whole blocks that it attends to.
SECOND_WAVE = [*random_prompts(seed=2, count=8, shortest=7, longest=700), random_prompt(2999, 1023)]
CONCURRENT_WAVE = random_prompts(seed=21, count=24, shortest=5, longest=3000)
# An engine alone too computes the last token of each of these in a step of its own, as the decode engine does.
ROUNDED_WAVE = [random_prompt(3000 + index, (1 + index % 7) * ROUNDED_STEP + 1) for index in range(21)]
NAMED_TOKENS = 1000
"""Tokens of the request whose descriptors are told of every pair."""


def check_tokens(
    answers: Sequence[Sequence[Sequence[int]]], model: str, prompts: Sequence[Sequence[int]], reference: Reference
) -> None:
    """Every sample of every answer must be what an engine computes that never received a cache."""
    different = different_prompts(answers, model, prompts, reference)
    assert not different, (
        f"tokens differ for {len(different)} of {len(prompts)} prompts, of lengths {sorted(different)}"
    )


def different_prompts(
    answers: Sequence[Sequence[Sequence[int]]], model: str, prompts: Sequence[Sequence[int]], reference: Reference
) -> list[int]:
    """Return the lengths of the prompts whose answers are not what an engine computes that never received a cache."""
    expected = reference.tokens(model, prompts, len(answers[0][0]))
    return [
        len(prompt)
        for prompt, answer, tokens in zip(prompts, answers, expected, strict=True)
        if any(sample != tokens for sample in answer)
    ]


def wait_until_unused(engines: Sequence[Engine]) -> None:
    """Every engine's KV cache must be free soon."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while (usages := [engine.usage() for engine in engines]) and any(usages):
        assert time.monotonic() < deadline, f"KV cache usage {usages} is left"
        time.sleep(0.05)


def submission_bytes(handoffs: Handoffs, num_tokens: int) -> int:
    """Return the bytes that one prefill rank writes to one decode rank for a prompt.

    By the models' shapes where these are plain: GQA pages of 64 keys and 64 values a token are moved whole, and where
    pairs of ranks share unequally many heads, the least counts. MLA: 4 layers, 576 elements a token. Otherwise as the
    decode engine's first rank counted it.
    """
    if handoffs.pair.is_mla:
        return 4 * num_tokens * 576 * 4
    if not handoffs.is_plain:
        handoffs.send(random_prompt(num_tokens, num_tokens), 1)
        load = handoffs.decode.loads()[-1]
        return int(load["bytes"]) // int(load["sources"])
    block_size = handoffs.decode.block_size
    itemsize = 1 if handoffs.pair.model == "fp8" else 4
    return -(-num_tokens // block_size) * pages_in_a_block(handoffs) * block_size * 128 * itemsize


def pages_in_a_block(handoffs: Handoffs) -> int:
    """Return how many pages of a GQA block a prefill rank writes at least to a decode rank that it writes to."""
    sides = handoffs.prefill, handoffs.decode
    num_layers, num_heads = PLAIN_SHAPES.get(handoffs.pair.model, (8, 4))
    heads_of_ranks = [max(1, num_heads // side.tp) for side in sides]
    return (num_layers // max(side.pp for side in sides)) * math.gcd(*heads_of_ranks)


def check_prefix_hits(handoffs: Handoffs, reference: Reference) -> None:
    """Send prompts that begin as others did; what the decode engine has is not received again."""
    logs_before, salt = handoffs.log_ends(), fresh_salt()
    first = random_prompt(50, 513)
    partly_known = first[:400] + random_prompt(51, 200)
    # prompt -> tokens in the decode engine's prefix cache (whole blocks of 128), and computed; the others are received.
    # Of a sliding window it got the end only: what begins alike and ends earlier or otherwise finds none of that.
    last, shared = (1, 0) if handoffs.pair.is_hybrid else (0, 384)
    expected = [(first, 0, last), (partly_known, shared, last), (first, 512, 1), (first[:512], shared, last)]
    for prompt, cached, computed in expected:
        received = len(prompt) - cached - computed
        before = handoffs.decode.prompt_tokens()
        answer = handoffs.send(prompt, salt=salt)
        check_tokens([answer], handoffs.pair.model, [prompt], reference)
        moved = handoffs.decode.prompt_tokens() - before
        assert (moved.cached, moved.received, moved.computed) == (cached, received, computed), len(prompt)
    handoffs.check_released(logs_before)


@contextmanager
def streaming(engine: Engine, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """Send a request whose answer is left unread; the client disconnects at the end."""
    address = urlsplit(engine.server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()


def check_adapter_is_refused(engines: Sequence[Engine], logs_before: Sequence[int], error: RequestFailed) -> None:
    """Both logs must name the adapter that has other weights on each engine, and both digests; nothing is left."""
    assert error.status == 500
    deadline = time.monotonic() + RELEASE_SECONDS
    told = re.compile(
        rf"adapter '{OWN_ADAPTER}' has other .*prefill has '(\w{{32}})', decode has '(\w{{32}})'.*Load the"
    )
    found: list[set[tuple[str, str]]] = [set()]
    while not all(found):
        assert time.monotonic() < deadline, found
        logs = [engine.log()[start:] for engine, start in zip(engines, logs_before, strict=True)]
        found = [set(told.findall(log)) for log in logs]
    [(prefill, decode)] = set.union(*found)
    assert prefill != decode
    assert all("[adapter-mismatch]" in log for log in logs)
    wait_until_unused(engines)


def wait_for_usage(engine: Engine, timeout_seconds: float = 10.0) -> None:
    """Wait until the engine has given blocks to a request."""
    deadline = time.monotonic() + timeout_seconds
    while engine.usage() == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)

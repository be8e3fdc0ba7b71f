"""The demo's prompts, and how they are sent to an OpenAI-compatible server."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

SHORTEST_PROMPT, LONGEST_PROMPT = 10, 3000
OUTPUT_TOKENS = 16
CONCURRENT_REQUESTS = 4
REQUEST_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered: the tokens, or the error that came in their place."""

    request_id: str
    token_ids: tuple[int, ...]
    error: str | None = None


def make_prompts(num_prompts: int, vocabulary_size: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens, their lengths spread evenly by ratio from 10 to 3000.

    >>> [len(prompt) for prompt in make_prompts(5, vocabulary_size=100)]
    [10, 42, 173, 721, 3000]
    """
    generator = np.random.default_rng(seed)
    lengths = np.rint(np.geomspace(SHORTEST_PROMPT, LONGEST_PROMPT, num_prompts)).astype(int)
    return [generator.integers(0, vocabulary_size, length).tolist() for length in lengths]


def send_prompts(
    url: str,
    prompts: Sequence[Sequence[int]],
    cache_salt: str | None = None,
    on_answer: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Send the prompts, four at a time, and return the answers in the same order.

    ``on_answer`` is called with the number of prompts that have been answered. An interrupt does not wait for
    requests under way: they end with the servers.
    """
    pool = ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="prompt")
    try:
        answers = []
        for answer in pool.map(lambda prompt: _send(url, prompt, cache_salt), prompts):
            answers.append(answer)
            if on_answer is not None:
                on_answer(len(answers))
        return answers
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _send(url: str, prompt: Sequence[int], cache_salt: str | None) -> Answer:
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            answer = json.load(response)
        return Answer(answer["id"], tuple(answer["choices"][0]["token_ids"]))
    except urllib.error.HTTPError as error:
        return Answer("", (), f"HTTP {error.code}: {error.read(500).decode(errors='replace')}")
    except (OSError, ValueError, KeyError) as error:
        return Answer("", (), repr(error))

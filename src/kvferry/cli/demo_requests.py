"""The requests of the demo: greedy completions on token ids, a few at a time."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

OUTPUT_TOKENS = 16
CONCURRENT_REQUESTS = 4
REQUEST_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server: the tokens, or an error."""

    request_id: str
    token_ids: tuple[int, ...]
    error: str | None = None


def vocabulary_size(model: Path) -> int:
    """Return the number of token ids of the model in a folder."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def send_prompts(
    url: str,
    prompts: Sequence[Sequence[int]],
    on_answer: Callable[[int], None],
    cache_salt: str | None = None,
) -> list[Answer]:
    """Send the prompts, four at a time, and return the answers in the same order.

    ``on_answer`` is called with the number of answers. An interrupt does not wait for running requests, which end with
    the servers.
    """
    pool = ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="prompt")
    try:
        answers = []
        for answer in pool.map(lambda prompt: _send(url, prompt, cache_salt), prompts):
            answers.append(answer)
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
        # The URL is that of a server which the demo started.
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:  # nosec B310
            answer = json.load(response)
        return Answer(answer["id"], tuple(answer["choices"][0]["token_ids"]))
    except urllib.error.HTTPError as error:
        return Answer("", (), f"HTTP {error.code}: {error.read(500).decode(errors='replace')}")
    except (OSError, ValueError, KeyError) as error:
        return Answer("", (), repr(error))

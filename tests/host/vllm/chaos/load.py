"""Clients that send prompts through the router, and what each got: right tokens, wrong tokens, an error, or nothing."""

import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from types import TracebackType
from typing import Self

from ..engine_pool import RequestFailed, completion_body, fresh_salt, post, tokens_of

IS_WHOLE = bool(os.environ.get("KVFERRY_CHAOS"))
"""Whether the tests of chaos run: with ``make test-chaos``."""
RIGHT, WRONG, NO_ANSWER, CONNECTION_LOST = "right", "WRONG TOKENS", "NO ANSWER", "connection lost"
"""Outcomes, besides the HTTP status of an error."""
PAUSE_SECONDS = 0.5
"""Before the next request of a client that got an error."""
Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Response:
    """What a client got for one request, and after how long."""

    outcome: str
    seconds: float
    num_tokens: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.outcome} after {self.seconds:.1f} s for {self.num_tokens} tokens: {self.text[:300]}"


@dataclass(frozen=True)
class Clients:
    """Sends prompts to ``url`` and compares the answers with ``expected``, the tokens of an engine without transfer."""

    url: str
    expected: dict[Prompt, list[int]]

    def send(self, prompt: Prompt, max_tokens: int, timeout_seconds: float) -> Response:
        """Send one prompt with a salt of its own, so that no engine has it in its prefix cache."""
        began_at, text = time.monotonic(), ""
        try:
            answer = post(
                f"{self.url}/v1/completions", completion_body(prompt, max_tokens, fresh_salt()), timeout_seconds
            )
            tokens = tokens_of(answer)[0]
            outcome = RIGHT if tokens == self.expected[prompt][:max_tokens] else WRONG
            text = "" if outcome is RIGHT else f"{tokens} instead of {self.expected[prompt][:max_tokens]}"
        except RequestFailed as error:
            outcome, text = str(error.status), error.text
        except TimeoutError as error:
            outcome, text = NO_ANSWER, str(error)
        except (OSError, HTTPException) as error:
            outcome, text = CONNECTION_LOST, repr(error)
        return Response(outcome, time.monotonic() - began_at, len(prompt), text)

    def send_all(
        self, prompts: Sequence[Prompt], max_tokens: int, timeout_seconds: float, at_once: int
    ) -> list[Response]:
        """Send the prompts, ``at_once`` at a time, each once."""
        with Load(self, prompts, max_tokens, timeout_seconds, at_once, times=len(prompts)) as load:
            pass
        return load.responses


@dataclass
class Load:
    """``at_once`` clients, each of which sends one prompt after another until :meth:`stop`, or ``times`` in all."""

    clients: Clients
    prompts: Sequence[Prompt]
    max_tokens: int
    timeout_seconds: float
    at_once: int
    times: int | None = None
    responses: list[Response] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        order = list(self.prompts)
        random.Random(len(order)).shuffle(order)
        endless = itertools.cycle(order)
        self._turns = iter(endless if self.times is None else itertools.islice(endless, self.times))
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self.at_once)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the requests that are under way; each ends within ``timeout_seconds``."""
        if self.times is None or error is not None:
            self.stop()
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Send no further request."""
        self._stop.set()

    @property
    def num_under_way(self) -> int:
        """Clients that wait for an answer, or are about to send."""
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                prompt = next(self._turns, None)
            if prompt is None:
                return
            response = self.clients.send(prompt, self.max_tokens, self.timeout_seconds)
            self.responses.append(response)
            if response.outcome != RIGHT:
                self._stop.wait(PAUSE_SECONDS)


def counted(responses: Sequence[Response]) -> Counter[str]:
    """Return how many responses there are of each outcome."""
    return Counter(response.outcome for response in responses)

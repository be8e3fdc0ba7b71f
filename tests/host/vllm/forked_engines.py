"""Engines without an API server, each in a process that is forked from one that has imported vLLM.

Such an engine of a small model starts in some seconds, where an API server takes half a minute: so that every model of
``tests/model_configs`` can have engines of its own.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 240.0, 180.0, 20.0
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = f"{__package__}.imported_engine"


class EngineFailed(Exception):
    """An engine did not start or answer; the text is its own error, ``log`` its log."""

    def __init__(self, text: str, log: str) -> None:
        self.log = log
        super().__init__(text)


@dataclass(frozen=True)
class Answer:
    """What an engine answered to one prompt."""

    tokens: list[int]
    params: dict[str, Any] | None


class ForkedEngine:
    """One engine of vLLM in a process of its own."""

    def __init__(self, name: str, log: Path, arguments: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self.name, self._log = name, log
        self.num_loaded = 0
        """Prompt tokens that a connector has brought, of all prompts so far; vLLM counts them."""
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=_serve, args=(theirs, log, dict(arguments), dict(variables)))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Raises :class:`EngineFailed` with the engine's own error."""
        self._receive(START_SECONDS)

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int, params: Sequence[Any] | None = None) -> None:
        """Send prompts, all at once, each with its ``kv_transfer_params``."""
        self._pipe.send((prompts, max_tokens, params or [None] * len(prompts)))

    def answers(self) -> list[Answer]:
        """Return the answers to what :meth:`ask` has sent. Raises :class:`EngineFailed`."""
        found, self.num_loaded = self._receive(ANSWER_SECONDS)
        return [Answer(*each) for each in found]

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End the engine as its user would, and by force where that takes too long; twice is fine."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join(STOP_SECONDS)
        self._pipe.close()

    def _receive(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while not self._pipe.poll(0.2):
            if not self._process.is_alive() or time.monotonic() > deadline:
                why = f"no answer after {seconds:g} s" if self._process.is_alive() else "the process has ended"
                raise EngineFailed(f"{self.name}: {why}; its log ends:\n{self.log()[-2000:]}", self.log())
        try:
            has_answered, found = self._pipe.recv()
        except EOFError:
            raise EngineFailed(f"{self.name} has ended; its log ends:\n{self.log()[-2000:]}", self.log()) from None
        if not has_answered:
            raise EngineFailed(found, self.log())
        return found


def prepare() -> None:
    """Import vLLM once, in the process from which all engines are forked."""
    FORKS.set_forkserver_preload([PRELOADED])


@contextlib.contextmanager
def running(engines: Sequence[ForkedEngine]) -> Iterator[None]:
    """Wait until the engines are ready, and stop them at the end."""
    try:
        for engine in engines:
            engine.wait_until_ready()
        yield
    finally:
        for engine in engines:
            engine.stop()


def _serve(pipe: Connection, log: Path, arguments: dict[str, Any], variables: dict[str, str]) -> None:
    os.setsid()  # so that the engine's own processes end with it
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(variables)
    try:
        from vllm import LLM

        engine = LLM(**arguments)
        pipe.send((True, None))
        while (order := _next_order(pipe)) is not None:
            pipe.send((True, (_generate(engine, *order), _num_loaded(engine))))
        engine.llm_engine.engine_core.shutdown()
    except Exception as error:
        traceback.print_exc()
        pipe.send((False, _first_cause(log, error)))
    sys.exit(0)


def _next_order(pipe: Connection) -> Any:
    """Return what the test asks next; None at the end, also where the test was killed."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def _generate(engine: Any, prompts: Any, max_tokens: int, params: Any) -> list[tuple[Any, ...]]:
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if each is None else {"kv_transfer_params": each},
        )
        for each in params
    ]
    outputs = engine.generate([{"prompt_token_ids": list(each)} for each in prompts], sampling, use_tqdm=False)
    return [(list(each.outputs[0].token_ids), each.kv_transfer_params) for each in outputs]


def _num_loaded(engine: Any) -> int:
    samples = [each for each in engine.get_metrics() if each.name == "vllm:prompt_tokens_by_source"]
    return sum(int(each.value) for each in samples if each.labels["source"] == "external_kv_transfer")


def _first_cause(log: Path, error: Exception) -> str:
    """Return the first error that the engine's own processes have logged, or this one."""
    for line in log.read_text(errors="replace").splitlines():
        head, separator, text = line.partition("] ")
        if separator and " ERROR " in f" {head} " and "Error: " in text and "Engine core" not in text:
            return text.strip()[:500]
    return f"{type(error).__name__}: {error}"[:500]

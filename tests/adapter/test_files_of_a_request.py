"""How many source files have a function that runs for a first request, on both sides and in all threads."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm")

import kvferry

from .handoff_engine import HandoffEngine, make_engine
from .test_forged_parameters import MODELS

__all__ = ["make_engine"]

SOURCE = Path(kvferry.__file__).parent
RESULT = "KVFERRY_FILES_OF_A_REQUEST"
"""A file that gets the numbers, for ``scripts/count_house.py``."""
MOST_FILES = {"sequential": 32, "concurrent": 33}
"""What is reached: one more must be an idea of its own, and worth the way of a reader."""
PROMPT = [7 * index % 500 for index in range(75)]
ANNOUNCED_SECONDS = 0.3
"""A prefill engine gets the request when the decode engine's announcement has come, as behind a slow queue."""


class Files:
    """The source files of which a function has run while ``counts``, in threads that begin after this object."""

    def __init__(self) -> None:
        self.counts = False
        self.found: set[str] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def close(self) -> None:
        """Trace no more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.counts and event == "call" and code.co_flags & CO_OPTIMIZED:  # no body of a module or class
            path = Path(code.co_filename)
            if SOURCE in path.parents:
                self.found.add(str(path.relative_to(SOURCE)))


def in_turn(prefill: HandoffEngine, decode: HandoffEngine) -> list[int]:
    """Hand a prompt over as a sequential router does; return the tokens."""
    held = prefill.ask("p", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    return decode.ask("d", PROMPT, held.params).tokens


def at_once(prefill: HandoffEngine, decode: HandoffEngine) -> list[int]:
    """Hand a prompt over as a concurrent router does; return the tokens."""
    port = prefill.connector._scheduler._source.bootstrap.port
    asked = {
        "do_remote_prefill": True,
        "transfer_id": "xfer-1",
        "remote_engine_id": "any",
        "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
    }
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(decode.ask, "d", PROMPT, asked)
        time.sleep(ANNOUNCED_SECONDS)
        prefill.ask("p", PROMPT, {"do_remote_decode": True, "transfer_id": "xfer-1"}, max_tokens=1)
        return answer.result().tokens


@pytest.mark.parametrize(("flow", "hand_over"), [("sequential", in_turn), ("concurrent", at_once)])
def test_the_files_of_a_first_request(flow: str, hand_over: Callable[..., list[int]], make_engine: Any) -> None:
    files = Files()
    try:
        model = MODELS["full attention"]
        prefill, decode = make_engine(model), make_engine(model, num_blocks=60)
        files.counts = True
        tokens = hand_over(prefill, decode)
        files.counts = False
    finally:
        files.close()
    assert tokens == decode.tokens_without_cache(PROMPT, 3)
    assert {"handoff/source.py", "handoff/destination.py"} <= files.found
    if name := os.environ.get(RESULT):
        result = Path(name)
        known = json.loads(result.read_text()) if result.exists() else {}
        result.write_text(json.dumps({**known, flow: len(files.found)}))
    assert len(files.found) <= MOST_FILES[flow], " ".join(sorted(files.found))

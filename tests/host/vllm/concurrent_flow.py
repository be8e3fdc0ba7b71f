"""A tiny router that sends a prompt to both engines at once, with the parameters of Mooncake's connector."""

import json
import re
import urllib.request
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .engine_pool import Engine, fresh_salt, tokens_of
from .handoffs import Handoffs


@dataclass(frozen=True)
class ConcurrentHandoffs(Handoffs):
    """One pair of running engines behind a tiny router that sends to both at once."""

    def send(self, prompt: Sequence[int], max_tokens: int = 8, salt: str | None = None, **more: Any) -> list[list[int]]:
        salt, transfer_id = salt or fresh_salt(), f"xfer-{uuid.uuid4()}"
        with ThreadPoolExecutor(1) as thread:
            params = to_prefill(transfer_id)
            prefilled = thread.submit(self.prefill.complete, prompt, 1, salt, kv_transfer_params=params)
            answer = self.decode.complete(
                prompt, max_tokens, salt, kv_transfer_params=self.to_decode(transfer_id), **more
            )
            prefilled.result()
        return tokens_of(answer)

    def to_decode(self, transfer_id: str) -> dict[str, Any]:
        address = bootstrap_address(self.prefill)
        entry = get_json(f"{address}/query")["0"]
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": address,
            "remote_engine_id": entry["engine_id"],
        }


def to_prefill(transfer_id: str) -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def bootstrap_address(engine: Engine) -> str:
    return str(re.findall(r"bootstrap queries are answered on (http://\S+:\d+)", engine.log())[-1])

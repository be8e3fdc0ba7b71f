"""API servers of engines and a router in this process, for ``kvferry check``: no vLLM, real control end points.

An engine counts what it is sent, and says so in its metrics as vLLM and kvferry do.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from kvferry.handoff.handshake import OURS
from kvferry.handoff.messages import Answer, Directory, DirectoryRequest, Noted, Question, Release
from kvferry.handoff.wire.server import Server
from kvferry.handoff.wire.trust import Keys, Trust
from kvferry.integrations.vllm.facts import EngineFacts, ReadyAnswer, may_ask
from kvferry.transport.protocol import own_identity

from .engines_in_process import HOST, HoldsCache, PrefillEngine

OPTIONS = {
    "--model": "m",
    "--quantization": "none",
    "--dtype": "float32",
    "--kv-cache-dtype": "auto",
    "--block-size": "4",
    "--disable-hybrid-kv-cache-manager": "False",
    "--speculative-config": "none",
    "transport": "auto",
    "integrity": "auto",
}
NUM_TOKENS = 64
PHASES = {"find": 0.008, "announce": 0.002, "post": 0.001, "move": 0.005, "confirm": 0.004, "next_step": 0.003}
"""Seconds. All but the last are the wait for a load."""
ROUTER_SECONDS = 0.03
"""More than the engines say that they spend on two prompts."""
Reply = tuple[int, Any]
"""The status and the JSON value, text or bytes of an answer."""


class ApiServer:
    """Answers HTTP by path; what ``replies`` lacks is answered with 404."""

    def __init__(self) -> None:
        self.replies: dict[str, Callable[[Mapping[str, str], Any], Reply]] = {}
        self.asked: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.asked.append(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                reply = owner.replies.get(self.path, lambda *_: (404, {"detail": "Not Found"}))
                status, found = reply(self.headers, body)
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with suppress(ConnectionError):
                    self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class EngineInProcess(ApiServer):
    """An engine: its control end point says its directory, its API server its facts, metrics and completions."""

    def __init__(self, ranks: Sequence[HoldsCache], role: str, keys: Keys | None = None, **changes: Any) -> None:
        super().__init__()
        self.engine = PrefillEngine(ranks)
        self.engine.listener.close()
        self.keys, self.changes = keys, changes
        self.listener = Server(HOST, 0, self._answer, keys=keys)
        self.released: list[str] = []
        self.facts = EngineFacts(
            host=HOST,
            reachable_host=HOST,
            ports=(self.listener.port,),
            role=role,
            oldest=OURS.oldest,
            newest=OURS.newest,
            key="" if keys is None else keys.fingerprint,
            trusted=() if keys is None else tuple(keys.trusted),
            connects_anywhere=False,
            allowed_hosts=(),
            requires_digests=False,
            caches_prefixes=True,
            clears_in_part=True,
            options=dict(OPTIONS),
        )
        self.ready = ReadyAnswer(ready=True)
        self.counts = {"success": 0, "loads": 0, "received": 0}
        self.failures: dict[str, int] = {}
        self.loads, self.transport = True, "cma"
        self.replies = {
            "/ready": self._say_ready,
            "/version": lambda *_: (200, {"version": "0.32.0"}),
            "/v1/models": lambda *_: (200, {"data": [{"id": "model"}]}),
            "/metrics": lambda *_: (200, self._metrics().encode()),
            "/v1/completions": self._complete,
        }

    def change_facts(self, **changes: Any) -> None:
        self.facts = msgspec.structs.replace(self.facts, **changes)

    def change_options(self, **changes: str) -> None:
        """Change options, ``kv_cache_dtype`` standing for ``--kv-cache-dtype``."""
        named = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        self.change_facts(options={**self.facts.options, **named})

    def directory(self) -> Directory:
        directory = self.engine.directory()
        entries = tuple(
            msgspec.structs.replace(
                entry,
                **{
                    "end_points": {"cma": b"a", "nixl": b"b"},
                    "process": own_identity(),
                    "answers_at": msgspec.structs.replace(entry.answers_at, port=self.listener.port),
                    **self.changes.get("entry", {}),
                },
            )
            for entry in directory.ranks
        )
        changes = {name: value for name, value in self.changes.items() if name != "entry"}
        return msgspec.structs.replace(directory, ranks=entries, **changes)

    def close(self) -> None:
        self.listener.close()
        super().close()

    def _answer(self, question: Question) -> Answer:
        if isinstance(question, Release):
            self.released += [handle.request_id for handle in question.handles]
            return Noted(self.engine.epoch)
        assert isinstance(question, DirectoryRequest)
        return self.directory()

    def _say_ready(self, headers: Mapping[str, str], _body: Any) -> Reply:
        given = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        facts = self.facts if may_ask(Trust(self.keys), HOST, given) else None
        found = msgspec.structs.replace(self.ready, engine=facts)
        return 200 if found.ready else 503, msgspec.json.encode(found)

    def _metrics(self) -> str:
        lines = [f'vllm:request_success_total{{engine="0"}} {self.counts["success"]}']
        if self.facts.role != "kv_producer":
            loads = self.counts["loads"]
            lines += [
                f"kvferry:loads_total {loads}",
                *(f'kvferry:failed_loads_total{{reason="{reason}"}} {n}' for reason, n in self.failures.items()),
                f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {self.counts["received"]}',
            ]
            for name, each in (
                ("wait_seconds", 0.02),
                ("transfer_seconds", 0.005),
                ("transfer_bytes", 4096),
                ("transfer_descriptors", 4),
                ("compared_bytes", 256),
                ("compare_seconds", 0.0005),
                *((f"phase_seconds:{phase}", each) for phase, each in PHASES.items()),
            ):
                name, _, phase = name.partition(":")
                labels = f'{{phase="{phase}",transport="{self.transport}"}}' if phase else ""
                lines += [f"kvferry:{name}_sum{labels} {each * loads}", f"kvferry:{name}_count{labels} {loads}"]
        for name in ("queue", "prefill"):
            success = self.counts["success"]
            lines += [f"vllm:request_{name}_time_seconds_sum {0.004 * success}"]
            lines += [f"vllm:request_{name}_time_seconds_count {success}"]
        return "\n".join(lines) + "\n"

    def _complete(self, _headers: Mapping[str, str], body: Any) -> Reply:
        params = body.get("kv_transfer_params") or {}
        self.counts["success"] += 1
        if params.get("do_remote_decode"):
            name = f"cmpl-{self.counts['success']}"
            held = {"epoch": self.engine.epoch, "generation": "1" * 16}
            told = {"do_remote_prefill": True, "remote_request_id": name, "kvferry": held}
            return 200, {"choices": [{"text": ""}], "kv_transfer_params": told}
        if params.get("do_remote_prefill") and self.loads:
            self.counts["loads"] += len(self.engine.ranks)
            self.counts["received"] += NUM_TOKENS
        return 200, {"choices": [{"text": ""}]}


class RouterInProcess(ApiServer):
    """A router of two engines. Not ``disaggregates``: it sends to the decode engine alone; not ``copies``: it drops the
    prefill engine's parameters.
    """

    def __init__(
        self, prefill: ApiServer, decode: ApiServer, *, disaggregates: bool = True, copies: bool = True
    ) -> None:
        super().__init__()

        def complete(headers: Mapping[str, str], body: Any) -> Reply:
            params: dict[str, Any] = {}
            time.sleep(ROUTER_SECONDS)
            if disaggregates:
                asked = {**body, "kv_transfer_params": {"do_remote_decode": True}}
                _, answer = prefill.replies["/v1/completions"](headers, asked)
                params = answer["kv_transfer_params"] if copies else {}
            return decode.replies["/v1/completions"](headers, {**body, "kv_transfer_params": params})

        self.replies = {"/v1/completions": complete}

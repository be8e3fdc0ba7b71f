"""The engines that the tests share: what they are, when they run, and how a test talks to one.

Starting an engine costs half a minute, so tests name the engines they need (``@pytest.mark.engines``) and are ordered
by stage; a stage starts its engines together. All have the role ``kv_both``: one serves as the prefill engine of one
pair and as the decode engine of another.
"""

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.handoff.wire.trust import make_keys
from kvferry.harness.launch import (
    API_SERVER,
    HOST,
    EngineSettings,
    Server,
    cache_usage,
    free_port,
    prompt_tokens,
    spread_over_cores,
    start_engine,
    stop_servers,
    wait_until_ready,
)
from kvferry.harness.tiny_models import make_tiny_model
from kvferry.integrations.vllm.plugin import CONNECTORS
from kvferry.integrations.vllm.versions import installed_version

from ...local.pool_master import Master
from .forked_api_servers import ApiServerForks
from .lora_adapter import ADAPTER_RANK, make_adapter

MODELS = {
    "gqa": "qwen3-tiny",
    "fp8": "qwen3-tiny",
    "mla": "deepseek-mla-tiny",
    "deepseek": "deepseek-v3-tiny",
    "six": "qwen3-six-heads",
    "mqa": "qwen3-one-head",
    "lora": "qwen3-tiny",
    "gemma": "gemma3-tiny",
    "gemma3n": "gemma3n-tiny",
    "gemma4": "gemma4-tiny",
    "gptoss": "gpt-oss-tiny",
    "qwennext": "qwen3-next-tiny",
    "granite": "granite-tiny",
}
MLA_MODELS = ("mla", "deepseek")
ROUNDED_MODELS = ("qwennext",)
"""Models that compute in bfloat16: tokens depend on the number of ranks and on which tokens share a step."""
ROUNDED_STEP = 256
"""Tokens of a prompt that an engine computes in one step with these models."""
BASE_MODEL, ADAPTER, OTHER_ADAPTER, OWN_ADAPTER = "model", "adapter", "other-adapter", "own-adapter"
"""Names that requests give: that of every engine's model, and those of the adapters of the model "lora". The last one
has other weights on each engine."""
EXTENSION = ("--worker-extension-cls", "engine_oracle.EngineOracle")
# In vLLM 0.32 the CPU's rotary_embedding kernel turns a query that is a slice of a wider tensor, as MLA's is, by wrong
# angles, other ones for a token alone than for the same token in a prompt; the plain PyTorch one is right.
# On a processor with AMX, vLLM takes AMX_MLA for every element type, and that one computes in bfloat16 only.
MLA_ARGUMENTS = (
    *("--compilation-config", json.dumps({"custom_ops": ["all", "-rotary_embedding"]})),
    *("--attention-backend", "CPU_MLA"),
)
# Long prompts are computed in parts, so that blocks leave the window while they run.
IN_PARTS = ("--max-num-batched-tokens", "512")
MODEL_ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(MLA_MODELS, MLA_ARGUMENTS),
    **dict.fromkeys(("gemma", "gemma3n", "gemma4", "gptoss"), IN_PARTS),
    **dict.fromkeys(ROUNDED_MODELS, ("--max-num-batched-tokens", str(ROUNDED_STEP))),
    "lora": ("--enable-lora", "--max-lora-rank", str(ADAPTER_RANK)),
    "fp8": ("--kv-cache-dtype", "fp8"),
}
# Generous: with nine ranks on two cores, where those that wait spin, an engine may not get to answer for half a minute.
CONNECTOR_SETTINGS: dict[str, Any] = {
    "lease_seconds": 180.0,
    "load_timeout_seconds": 120.0,
    "transport": "cma",
}

OFFLOAD = "KVFerryOffloadConnector"
MULTI = "MultiConnector"
TIER_SETTINGS: dict[str, Any] = {"host_bytes": 256 << 20, "disk_bytes": 1 << 30}
POOL_BYTES = 160 << 20
# Models as small as those of the tests are often quicker to compute; the tests count what is found, on a busy machine
# too.
ALWAYS: dict[str, Any] = {"loads": "always", "load_wait_seconds": 20.0}
REPEATABLE = ("--prefix-caching-hash-algo", "sha256_cbor")
# The longest prompt and one block more: less than the prompts of one test have.
SMALL: dict[str, Any] = {"max_model_len": 2048, "kv_cache_bytes": 48 << 20}

EXPLAINED = ("--middleware", "kvferry.integrations.vllm.failed_loads.FailedLoadAnswers")
"""As docs/failures.md has it: clients get the reason of a failed load."""
ASKED = ("--middleware", "kvferry.integrations.vllm.readiness.Readiness")
"""What `kvferry check` asks; such an engine has a fixed port too."""
CHUNKED = ("--max-num-batched-tokens", "256", "--enable-chunked-prefill")
BOTH_CORES = (",".join(sorted(spread_over_cores(2))),)
# A hold whose request was given up before the answer came ends with its lease.
WATCHED: dict[str, Any] = {
    "lease_seconds": 20.0,
    "load_timeout_seconds": 15.0,
    "arguments": ("--scheduler-cls", "watched_scheduler.WatchedScheduler"),
}
WATCH_FILE = "KVFERRY_WATCH_FILE"
IN_ENGINE = Path(__file__).with_name("in_engine")
"""The folder of what runs inside an engine."""
FORKING_API_SERVER = (str(Path(__file__).with_name("forking_api_server.py")),)
READ_BY_IMPORTS = {"VLLM_CPU_CI_ENV": "1", "TORCHDYNAMO_DISABLE": "1"}
"""What engines are started with that vLLM and PyTorch read when they are imported, where nothing is compiled."""
SEVERAL_API_SERVERS = (str(Path(__file__).with_name("several_api_servers.py")),)
LAST_CORE = spread_over_cores(1, from_last=True)
# Some ten seconds of a C++ compiler at the start.
COMPILED: dict[str, Any] = {
    "arguments": ("--no-enforce-eager",),
    "variables": {"TORCHDYNAMO_DISABLE": "0", "VLLM_CPU_CI_ENV": "0"},
}

KEYED_MODELS = ("gemma", "gemma4")
"""Models whose engines talk over TLS and sign their parameters; those of the others have no keys."""
MORE_MODELS = ("deepseek", "six", "mqa", "lora", "gemma3n", "gemma4", "gptoss")
"""Models with one engine of each kind: the reference, one rank, two ranks."""
# Name -> model and what differs from the defaults; the oracle sets ``layers_per_span`` in an engine that runs.
# Peers of one rank compute on different cores. A prefill engine on "auto" offers cma and nixl, and a decode engine
# takes cma unless it is told to use nixl.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa-reference": ("gqa", {"role": None, "cores": BOTH_CORES}),
    # Those with turn_seconds hold their answers for the next turn, with every request of every test.
    "gqa-tp1": ("gqa", {"turn_seconds": 120.0, "arguments": (*EXPLAINED, *ASKED, "--enable-prompt-tokens-details")}),
    "gqa-tp1-other": (
        "gqa",
        {
            "prefix_caching": False,
            "load_failure_policy": "recompute",
            "kv_cache_bytes": 128 << 20,
            "max_model_len": 2048,
            "cores": LAST_CORE,
        },
    ),
    "gqa-tp1-nixl": ("gqa", {"transport": "nixl", "cores": LAST_CORE}),
    "gqa-tp1-mooncake": ("gqa", {"transport": "mooncake", "cores": LAST_CORE}),
    "gqa-tp2-mooncake": ("gqa", {"tensor_parallel_size": 2, "transport": "mooncake"}),
    "gqa-tp2": ("gqa", {"tensor_parallel_size": 2, "transport": "auto", "turn_seconds": 120.0}),
    "gqa-tp2-other": ("gqa", {"tensor_parallel_size": 2, "transport": "auto", "load_failure_policy": "recompute"}),
    "gqa-tp4": ("gqa", {"tensor_parallel_size": 4}),
    # Engines of one model with tiers have the disk tier in one folder, so only one of them runs at a time.
    "gqa-keeps-tp1": ("gqa", {"connector": OFFLOAD, **SMALL}),
    "gqa-keeps-tp1-again": ("gqa", {"connector": OFFLOAD, **SMALL}),
    "gqa-keeps-tp2": ("gqa", {"connector": OFFLOAD, **SMALL, "tensor_parallel_size": 2}),
    "gqa-keeps-pp2": ("gqa", {"connector": OFFLOAD, **SMALL, "pipeline_parallel_size": 2}),
    "mqa-keeps-tp1": ("mqa", {"connector": OFFLOAD, **SMALL, "kv_cache_bytes": 12 << 20}),
    "mqa-keeps-tp2": ("mqa", {"connector": OFFLOAD, **SMALL, "kv_cache_bytes": 24 << 20, "tensor_parallel_size": 2}),
    "gemma-keeps-tp1": ("gemma", {"connector": OFFLOAD, **SMALL, "kv_cache_bytes": 20 << 20}),
    "gemma-keeps-tp1-again": ("gemma", {"connector": OFFLOAD, **SMALL, "kv_cache_bytes": 20 << 20}),
    "gemma-keeps-tp2": (
        "gemma",
        {"connector": OFFLOAD, **SMALL, "kv_cache_bytes": 20 << 20, "tensor_parallel_size": 2},
    ),
    "mla-keeps-tp1": ("mla", {"connector": OFFLOAD, **SMALL}),
    "mla-keeps-tp1-again": ("mla", {"connector": OFFLOAD, **SMALL}),
    "mla-keeps-tp2": ("mla", {"connector": OFFLOAD, **SMALL, "tensor_parallel_size": 2}),
    "lora-keeps-tp1": ("lora", {"connector": OFFLOAD, **SMALL}),
    "lora-keeps-tp2": ("lora", {"connector": OFFLOAD, **SMALL, "tensor_parallel_size": 2}),
    # These share a pool and have no disk.
    "gqa-shares-tp1": ("gqa", {"connector": OFFLOAD, **SMALL, "lower_tier": "pool"}),
    "gqa-shares-tp1-other": ("gqa", {"connector": OFFLOAD, **SMALL, "lower_tier": "pool", "cores": LAST_CORE}),
    "gqa-shares-tp2": ("gqa", {"connector": OFFLOAD, **SMALL, "lower_tier": "pool", "tensor_parallel_size": 2}),
    # Each both moves prompts and keeps blocks, in host memory.
    "gqa-moves-and-keeps": ("gqa", {"connector": MULTI, **SMALL, **WATCHED}),
    "gqa-moves-and-keeps-other": ("gqa", {"connector": MULTI, **SMALL, **WATCHED, "cores": LAST_CORE}),
    "gqa-tp1-next": ("gqa", {"cores": LAST_CORE, "arguments": ASKED}),
    # Prompts are computed in chunks, several requests sharing a step.
    "gqa-chunked": ("gqa", {"cores": LAST_CORE, "arguments": CHUNKED}),
    # Has 35 blocks, and begins a prompt although there are not enough for all of it.
    "gqa-small": (
        "gqa",
        {
            "kv_cache_bytes": 72 << 20,
            "cores": LAST_CORE,
            "arguments": (*CHUNKED, "--no-scheduler-reserve-full-isl"),
        },
    ),
    # As vLLM runs unless it is told otherwise: layers are parts of a compiled graph.
    "gqa-compiled": ("gqa", {"layers_per_span": 3, "cores": LAST_CORE} | COMPILED),
    # Waits for a prompt, and for whoever writes, no longer than for this.
    "gqa-hasty": ("gqa", {"load_timeout_seconds": 15.0, "cores": LAST_CORE}),
    "gqa-layers": (
        "gqa",
        {"layers_per_span": 3, "load_failure_policy": "recompute", "cores": LAST_CORE},
    ),
    "mla-reference": ("mla", {"role": None, "cores": BOTH_CORES}),
    "mla-tp1": ("mla", {}),
    "mla-tp1-other": ("mla", {"load_failure_policy": "recompute", "cores": LAST_CORE}),
    "mla-tp2": ("mla", {"tensor_parallel_size": 2}),
    # Two engine cores behind two API servers.
    "gqa-dp2": ("gqa", {"data_parallel_size": 2, "program": SEVERAL_API_SERVERS}),
    "gqa-bfloat16": (
        "gqa",
        {"dtype": "bfloat16", "kv_cache_bytes": 32 << 20, "max_model_len": 1024, "cores": LAST_CORE},
    ),
    "gqa-pp2": ("gqa", {"pipeline_parallel_size": 2}),
    "gqa-pp2x2": ("gqa", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    # Finds the connector by its module's path and loads no plugin.
    "fp8-reference": ("fp8", {"role": None, "cores": BOTH_CORES}),
    "fp8-tp1": ("fp8", {}),
    "fp8-tp2": ("fp8", {"tensor_parallel_size": 2}),
    # Its workers start anew, as on a CPU without these tests: the connector comes too late for their layout.
    "gqa-block64": (
        "gqa",
        {
            "program": API_SERVER,
            "block_size": 64,
            "cores": LAST_CORE,
            "connector_module": CONNECTORS["KVFerryConnector"],
        },
    ),
    "gemma-chunked": ("gemma", {"tensor_parallel_size": 2, "arguments": CHUNKED}),
    "gemma-layers": ("gemma", {"layers_per_span": 2, "cores": LAST_CORE}),
    "gemma-reference": ("gemma", {"role": None, "cores": BOTH_CORES}),
    "gemma-tp1": ("gemma", {"turn_seconds": 120.0}),
    "gemma-tp1-other": ("gemma", {"cores": LAST_CORE}),
    # Its second stage has no layer of the second of three groups.
    "gemma-pp2": ("gemma", {"pipeline_parallel_size": 2}),
    "gemma-tp2": ("gemma", {"tensor_parallel_size": 2}),
    "granite-reference": ("granite", {"role": None, "cores": BOTH_CORES, "prefix_caching": False}),
    "granite-tp1": ("granite", {"prefix_caching": False}),
    "granite-tp1-other": ("granite", {"prefix_caching": False, "cores": LAST_CORE}),
    "granite-tp2": (
        "granite",
        {"tensor_parallel_size": 2, "prefix_caching": False, "load_failure_policy": "recompute", "turn_seconds": 120.0},
    ),
    **{f"{model}-reference": (model, {"role": None, "cores": BOTH_CORES}) for model in MORE_MODELS},
    **{f"{model}-tp1": (model, {}) for model in MORE_MODELS},
    **{f"{model}-tp2": (model, {"tensor_parallel_size": 2}) for model in MORE_MODELS},
    "six-tp3": ("six", {"tensor_parallel_size": 3}),
    "gemma4-chunked": ("gemma4", {"tensor_parallel_size": 2, "arguments": CHUNKED}),
    "gptoss-chunked": ("gptoss", {"tensor_parallel_size": 2, "arguments": CHUNKED}),
    # vLLM's CPU kernel for gated delta nets takes bfloat16 only.
    "qwennext-reference": ("qwennext", {"role": None, "prefix_caching": False, "dtype": "bfloat16"}),
    "qwennext-tp2-reference": (
        "qwennext",
        {"role": None, "tensor_parallel_size": 2, "prefix_caching": False, "dtype": "bfloat16"},
    ),
    "qwennext-tp1": ("qwennext", {"prefix_caching": False, "dtype": "bfloat16"}),
    "qwennext-tp1-other": (
        "qwennext",
        {"prefix_caching": False, "dtype": "bfloat16", "load_failure_policy": "recompute", "cores": LAST_CORE},
    ),
    "qwennext-tp2": ("qwennext", {"tensor_parallel_size": 2, "prefix_caching": False, "dtype": "bfloat16"}),
}
VLLM_ENVIRONMENTS = Path(os.environ.get("KVFERRY_VLLM_ENVIRONMENTS", "build/vllm-environments"))
"""A folder for each other release of vLLM that ``make test-versions`` runs."""
OTHER_RELEASES = ("0.30", "0.31")
OWN_RELEASE = ".".join(installed_version().split(".")[:2])
PACKS_CONVOLUTIONS = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
# On such a processor vLLM before 0.32 packs the weights of every convolution, by a kernel for bfloat16 only.
FLOAT_CONVOLUTION = "\"causal_conv1d_fwd_kernel_impl\" not implemented for 'Float'"
CANNOT_START: Mapping[str, Mapping[str, str]] = {
    release: {"granite": FLOAT_CONVOLUTION} if PACKS_CONVOLUTIONS else {} for release in OTHER_RELEASES
}
"""For each release the models with which its own engine, without a connector, does not start here, and the error.

Their pairs are left out; ``test_versions.py`` starts each such engine, which must still end by this error.
"""
PASSED_ON = {"transport", "load_timeout_seconds", "lease_seconds", "turn_seconds"}
"""What differs in the connector's settings, not in the engine's."""
# What runs together; memory for all at once is not asked for. Those of two stages that follow one another stay.
STAGES: tuple[tuple[str, ...], ...] = (
    ("gqa-reference", "gqa-tp1", "gqa-tp1-next", "gqa-tp2", "gqa-chunked", "gqa-layers"),
    ("gqa-reference", "gqa-tp1", "gqa-tp1-other", "gqa-tp2", "gqa-block64", "gqa-pp2"),
    ("gqa-tp2", "gqa-tp2-other", "gqa-tp1-nixl", "gqa-tp4"),
    ("gqa-reference", "gqa-tp4", "gqa-tp1", "gqa-dp2"),
    ("gqa-tp1-nixl", "gqa-bfloat16", "mla-reference", "mla-tp1", "mla-tp1-other", "mla-tp2"),
    ("gqa-reference", "gqa-tp2", "gqa-pp2x2"),
    ("gqa-reference", "gqa-tp1-mooncake", "gqa-tp2-mooncake"),
    ("fp8-reference", "fp8-tp1", "fp8-tp2"),
    ("gemma-reference", "gemma-tp1", "gemma-tp1-other", "gemma-tp2", "gemma-pp2"),
    ("granite-reference", "granite-tp1", "granite-tp1-other", "granite-tp2"),
    *((f"{model}-reference", f"{model}-tp1", f"{model}-tp2") for model in ("deepseek", "mqa", "lora", "gemma3n")),
    ("six-reference", "six-tp1", "six-tp2", "six-tp3"),
    ("qwennext-reference", "qwennext-tp2-reference", "qwennext-tp1", "qwennext-tp1-other", "qwennext-tp2"),
    *((f"{model}-reference", f"{model}-tp1", f"{model}-tp2", f"{model}-chunked") for model in ("gemma4", "gptoss")),
    ("gqa-reference", "gqa-tp2", "gqa-tp1-nixl", "gqa-tp1", "gqa-small", "gqa-hasty"),
    ("gqa-reference", "gqa-tp1", "gqa-tp2", "gqa-compiled"),
    ("gemma-reference", "gemma-tp1", "gemma-chunked", "gemma-layers"),
    ("gqa-reference", "gqa-moves-and-keeps", "gqa-moves-and-keeps-other"),
    *(("gqa-reference", f"gqa-keeps-{ranks}") for ranks in ("tp1", "tp2", "pp2")),
    *((f"{model}-reference", f"{model}-keeps-{ranks}") for model in ("gemma", "mla") for ranks in ("tp1", "tp2")),
    ("mqa-reference", "mqa-keeps-tp2"),
    ("lora-reference", "lora-keeps-tp2"),
    ("gqa-reference", "gqa-shares-tp1", "gqa-shares-tp1-other", "gqa-shares-tp2"),
    # One pair of two releases at a time: their processes have no libraries in common, and need more memory together.
    *(
        stage
        for kind in ("gqa", "gemma")
        for one, other in (*((release, "") for release in OTHER_RELEASES), ("0.30", "@0.31"))
        for stage in (
            (f"{kind}-reference", f"{kind}-tp2@{one}", f"{kind}-tp1{other}"),
            (f"{kind}-reference", f"{kind}-tp2{other}", f"{kind}-tp1@{one}"),
            *(((f"{kind}-tp1@{one}", f"{kind}-bfloat16{other}"),) if kind == "gqa" else ()),
        )
    ),
)


def paths_in_engine() -> str:
    """Return the paths of Python in an engine: what runs inside it, and what that imports of the tests."""
    root = Path(__file__).parents[3]
    return os.pathsep.join(filter(None, (str(IN_ENGINE), str(root), os.environ.get("PYTHONPATH"))))


def is_forked(settings: EngineSettings, environment: Mapping[str, str]) -> bool:
    """Return whether an engine's API server is forked; one that compiles, or of another vLLM, is started anew."""
    reads = [environment[variable] for variable in READ_BY_IMPORTS]
    return (settings.program, settings.python, reads) == (
        FORKING_API_SERVER,
        sys.executable,
        [*READ_BY_IMPORTS.values()],
    )


def described(name: str) -> tuple[str, dict[str, Any]]:
    """Return the model and the differences of an engine, such as "gqa-tp2", or "gqa-tp2@0.31" of another vLLM."""
    return ENGINES[name.partition("@")[0]]


def obstacle(name: str) -> str:
    """Return why no engine of this name can run with its release; nothing where one can."""
    release, model = name.partition("@")[2] or OWN_RELEASE, described(name)[0]
    error = CANNOT_START.get(release, {}).get(model)
    return "" if error is None else f"vLLM {release} itself does not start with this model here: {error}"


def stage_of(names: Iterable[str]) -> int:
    """Return the first stage in which all these engines run."""
    needed = set(names)
    return next(index for index, stage in enumerate(STAGES) if needed <= set(stage))


class RequestFailed(Exception):
    """An engine answered with an HTTP error; ``status`` and ``text`` are what it said."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text
        super().__init__(f"{status}: {text[:500]}")


def post(
    url: str, body: dict[str, Any], timeout_seconds: float = 300.0, headers: Mapping[str, str] | None = None
) -> Any:
    """Post JSON and return the JSON of the answer."""
    headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise RequestFailed(error.code, error.read().decode(errors="replace")) from None


def fresh_salt() -> str:
    """Return a ``cache_salt`` that no request has had."""
    return uuid.uuid4().hex


def completion_body(prompt: Sequence[int], max_tokens: int, salt: str, **more: Any) -> dict[str, Any]:
    """Return a greedy completion request on token ids."""
    return {
        "model": BASE_MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt,
        **more,
    }


@dataclass(frozen=True)
class Engine:
    """A running engine."""

    name: str
    model: str
    server: Server
    settings: EngineSettings

    @property
    def tp(self) -> int:
        return self.settings.tensor_parallel_size

    @property
    def pp(self) -> int:
        return self.settings.pipeline_parallel_size

    @property
    def block_size(self) -> int:
        """Tokens in a block of attention: what was asked for, else the engine's default on CPUs.

        A model with states has longer blocks, whose size nobody chooses.
        """
        return self.settings.block_size or (16 if self.model in MLA_MODELS else 128)

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        salt: str | None = None,
        dp_rank: int | None = None,
        **more: Any,
    ) -> Any:
        """Send a completion; the engine chooses the data-parallel rank unless one is named."""
        adapter = {"model": ADAPTER} if self.model == "lora" else {}
        body = completion_body(prompt, max_tokens, salt or fresh_salt(), **{**adapter, **more})
        headers = {} if dp_rank is None else {"X-data-parallel-rank": str(dp_rank)}
        return post(f"{self.server.url}/v1/completions", body, headers=headers)

    def prefill(self, prompt: Sequence[int], salt: str | None = None, **more: Any) -> dict[str, Any]:
        """Do as a router does with the prefill engine; return its ``kv_transfer_params``."""
        answer = self.complete(prompt, 1, salt, kv_transfer_params={"do_remote_decode": True}, **more)
        params = answer["kv_transfer_params"]
        assert params, f"{self.name} exported nothing"
        return dict(params)

    def decode(
        self, prompt: Sequence[int], params: dict[str, Any], max_tokens: int = 8, salt: str | None = None, **more: Any
    ) -> list[list[int]]:
        """Do as a router does with the decode engine; return the tokens of every sample."""
        answer = self.complete(prompt, max_tokens, salt, kv_transfer_params=params, **more)
        return tokens_of(answer)

    def call(self, method: str, argument: Any = None) -> list[Any]:
        """Call an :class:`EngineOracle` method in every worker."""
        body = {"method": method, "args": [] if argument is None else [json.dumps(argument)], "timeout": 60}
        return list(post(f"{self.server.url}/collective_rpc", body)["results"])

    def set_faults(self, plan: dict[str, Any] | None) -> None:
        body = {"method": "oracle_faults", "args": [json.dumps(plan)], "timeout": 60}
        post(f"{self.server.url}/collective_rpc", body)

    def num_preemptions(self) -> float:
        """Return how often the engine has preempted a request."""
        return self.server.metrics()["vllm:num_preemptions_total"]

    def num_running(self) -> float:
        """Return how many requests are being computed."""
        return self.server.metrics()["vllm:num_requests_running"]

    def usage(self) -> float:
        return cache_usage(self.server.metrics())

    def prompt_tokens(self) -> Any:
        return prompt_tokens(self.server.metrics())

    @property
    def layout(self) -> str:
        """The KV cache layout that the engine says it uses."""
        return re.findall(r"Using (\w+) KV cache layout", self.log())[-1]

    def loads(self) -> list[dict[str, Any]]:
        """Return the transfer log of the engine's first rank, or of the first of each data-parallel rank."""
        return self.loads_of_ranks()[0]

    def loads_of_ranks(self) -> list[list[dict[str, Any]]]:
        """Return the loads and writes in the transfer log of every rank."""
        log = Path(str(self.settings.connector_settings["transfer_log"]))
        paths = sorted(log.parent.glob(f"{log.name}.rank*"))
        lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
        return [[line for line in of_rank if "step_began_at" not in line] for of_rank in lines]

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps in which the first rank has computed prompts that are written meanwhile."""
        log = Path(f"{self.settings.connector_settings['transfer_log']}.rank0")
        return [step for line in log.read_text().splitlines() if "step_began_at" in (step := json.loads(line))]

    def log(self) -> str:
        return self.server.process.log_path.read_text(errors="replace")


def tokens_of(answer: Any) -> list[list[int]]:
    """Return the output tokens of every sample of a completion."""
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))]


@dataclass
class EnginePool:
    """Starts engines by name, several at once, and stops them."""

    folder: Path
    models: Path
    running: dict[str, Engine] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    pool_master: Master | None = None
    """The master of the pool that engines share; it starts with the first of them."""
    forks: ApiServerForks | None = None
    """What forks the API servers; it starts with the first of them."""

    def model_path(self, model: str) -> Path:
        return make_tiny_model(MODELS[model], self.models)

    def adapters(self, engine: str) -> list[str]:
        """Return the adapters of the model "lora" as an engine is told of them.

        Engines that hand prompts to one another have them in folders of their own. Stored blocks are found under the
        same path only: vLLM's hash has the path.
        """
        model, is_offload = self.model_path("lora"), described(engine)[1].get("connector") == OFFLOAD
        folder = self.folder if is_offload else self.folder / f"{engine}-adapters"
        seeds = {ADAPTER: 0, OTHER_ADAPTER: 1, OWN_ADAPTER: 2 + list(ENGINES).index(engine)}
        return [f"{name}={make_adapter(model, folder / name, seed)}" for name, seed in seeds.items()]

    def settings(self, name: str) -> EngineSettings:
        model, differences = described(name)
        differences = {key: value for key, value in differences.items() if key != "layers_per_span"}
        tp, pp = (differences.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
        connector_settings = dict(CONNECTOR_SETTINGS)
        for setting in PASSED_ON & differences.keys():
            connector_settings[setting] = differences.pop(setting)
        if ASKED[1] in differences.get("arguments", ()):
            connector_settings["port"] = free_port()
        lower_tier = differences.pop("lower_tier", "disk")
        cache_bytes = differences.pop("kv_cache_bytes", 256 << 20) // (pp * (1 if model in MLA_MODELS else tp))
        arguments: dict[str, Any] = {"role": "kv_both", "kv_cache_bytes": cache_bytes, "program": FORKING_API_SERVER}
        if release := name.partition("@")[2]:
            arguments["python"] = str(VLLM_ENVIRONMENTS / release / "bin" / "python")
        adapters = ("--lora-modules", *self.adapters(name)) if model == "lora" else ()
        given = (*MODEL_ARGUMENTS.get(model, ()), *adapters, *differences.pop("arguments", ()))
        arguments.update(differences, arguments=given)
        if arguments["role"] is not None:
            connector_settings["transfer_log"] = str(self.folder / f"{name}.transfers")
            connector = differences.get("connector", "")
            connector_settings = self.with_tiers(connector, model, lower_tier, connector_settings)
            arguments["arguments"] = (*given, *(REPEATABLE if connector == OFFLOAD else ()))
            arguments.update(connector_settings=connector_settings, arguments=(*arguments["arguments"], *EXTENSION))
            needed = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": paths_in_engine()}
            arguments["variables"] = needed | differences.get("variables", {})
            if "connector_module" in differences:
                arguments["variables"]["VLLM_PLUGINS"] = ""
            if connector == MULTI:
                arguments["variables"][WATCH_FILE] = str(self.watch_file(name))
        return EngineSettings(self.model_path(model), **arguments)

    def with_tiers(self, connector: str, model: str, lower_tier: str, moves: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a connector; ``moves`` are those of one that moves prompts."""
        if connector == OFFLOAD and lower_tier == "pool":
            if self.pool_master is None:
                self.pool_master = Master(self.folder)
            pool = {"pool_master": self.pool_master.address, "pool_bytes": POOL_BYTES}
            return {"host_bytes": TIER_SETTINGS["host_bytes"], **pool, **ALWAYS}
        if connector == OFFLOAD:
            return {**TIER_SETTINGS, **ALWAYS, "disk_path": str(self.disk_folder(model))}
        if connector == MULTI:
            children = {"KVFerryConnector": moves, OFFLOAD: {"host_bytes": TIER_SETTINGS["host_bytes"], **ALWAYS}}
            return {
                "connectors": [
                    {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": own}
                    for name, own in children.items()
                ]
            }
        return moves | ({"keys": str(self.keys_folder())} if model in KEYED_MODELS else {})

    def keys_folder(self) -> Path:
        """Return the keys that all engines with keys share."""
        folder = self.folder / "keys"
        if not folder.exists():
            make_keys(folder)
        return folder

    def watch_file(self, name: str) -> Path:
        """Return the file to which an engine with both connectors writes what is under way."""
        return self.folder / f"{name}.under-way"

    def disk_folder(self, model: str) -> Path:
        """Return the folder of the disk tier of all engines of a model."""
        return self.folder / f"{model}-disk"

    def need(self, names: Iterable[str]) -> None:
        """Start those of the engines that do not run, together, and wait for them."""
        missing = [name for name in names if name not in self.running]
        started_at = time.monotonic()
        started = {name: self.start(name, self.settings(name)) for name in missing}
        try:
            wait_until_ready(list(started.values()), timeout_seconds=400)
        except BaseException:
            stop_servers(list(started.values()))
            raise
        for name, server in started.items():
            model, differences = described(name)
            self.running[name] = engine = Engine(name, model, server, self.settings(name))
            if "layers_per_span" in differences:
                engine.call("oracle_spans", differences["layers_per_span"])
        if missing:
            self.seconds[", ".join(missing)] = time.monotonic() - started_at

    def start(self, name: str, settings: EngineSettings) -> Server:
        """Start one engine and return at once."""
        environment = settings.environment(port := free_port())
        if not is_forked(settings, environment):
            return start_engine(name, settings, self.folder, port)
        if self.forks is None:
            self.forks = ApiServerForks(self.folder / "forks.log", READ_BY_IMPORTS | {"PYTHONPATH": paths_in_engine()})
        _, _, *arguments = settings.command(port)
        process = self.forks.start(name, arguments, self.folder / f"{name}.log", environment)
        return Server(process, f"http://{HOST}:{port}", time.monotonic())

    def stop_all_but(self, names: Iterable[str]) -> None:
        """Stop the others."""
        kept = set(names)
        stopped = [self.running.pop(name) for name in list(self.running) if name not in kept]
        stop_servers([engine.server for engine in stopped])

    def close(self) -> None:
        """Stop everything, and print how long the engines took to start."""
        self.stop_all_but(())
        if self.forks is not None:
            self.forks.close()
        if self.pool_master is not None:
            self.pool_master.kill()
        for names, seconds in self.seconds.items():
            print(f"\nstarting {names}: {seconds:.1f} s", end="")


@dataclass
class Reference:
    """Tokens from a plain engine without a connector, which never received a cache; computed once per prompt."""

    pool: EnginePool
    known: dict[tuple[str, int, tuple[int, ...]], list[int]] = field(default_factory=dict)

    def tokens(self, model: str, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[list[int]]:
        keys = [(model, max_tokens, tuple(prompt)) for prompt in prompts]
        unknown = [key for key in dict.fromkeys(keys) if key not in self.known]
        if unknown:
            name = f"{model}-reference"
            self.pool.need([name])
            engine = self.pool.running[name]
            with ThreadPoolExecutor(1 if model in ROUNDED_MODELS else len(unknown)) as threads:
                answers = threads.map(lambda key: engine.complete(key[2], key[1]), unknown)
                for key, answer in zip(unknown, answers, strict=True):
                    self.known[key] = tokens_of(answer)[0]
        return [self.known[key] for key in keys]

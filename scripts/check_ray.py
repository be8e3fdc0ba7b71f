"""Runs docs/deploy/ray_app.py on a cluster of Ray that it starts on this machine, and asks it for tokens.

    python scripts/check_ray.py [seconds]

Needs an environment with Ray Serve, vLLM for CPUs and kvferry: see docs/deploy/ray.md. The answers of the application
must be those that the prefill engine gives when it is asked directly, and the decode engine must have received every
token of every prompt. Exit status 1 says that one of these is not so.
"""

import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Ray's workers take over these variables. The last three shorten vLLM's start.
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"VLLM_CPU_CI_ENV": "1", "TORCHDYNAMO_DISABLE": "1", "KVFERRY_SLEEPING_WORKERS": "1"}

import httpx
import numpy as np
import ray
from ray import serve
from ray.serve.llm.openai_api_models import CompletionRequest

from kvferry.harness.launch import free_port
from kvferry.harness.tiny_models import VOCABULARY_SIZE, make_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "deploy"))
from ray_app import NUM_CPUS, application

APPLICATION = "kvferry"
PROMPT_TOKENS = (300, 77, 513, 129)
ANSWER_TOKENS = 12
METRICS_SECONDS = 90.0
RECEIVED = re.compile(
    r'^ray_vllm_prompt_tokens_by_source_total\{.*source="external_kv_transfer".*\} (.*)$', re.MULTILINE
)


def main() -> int:
    """Return 1 where tokens differ or were not received."""
    generator = np.random.default_rng(7)
    prompts = [generator.integers(0, VOCABULARY_SIZE, size).tolist() for size in PROMPT_TOKENS]
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvferry-ray-") as folder:
        model = make_tiny_model("qwen3-tiny", Path(folder))
        ray.init(num_cpus=NUM_CPUS, object_store_memory=100 << 20, include_dashboard=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 2048}
            serve.run(application(str(model), **settings), name=APPLICATION)
            print("the application serves", flush=True)
            moved = [ask_ingress(port, prompt) for prompt in prompts]
            alone = [ask_prefill_engine(prompt) for prompt in prompts]
            received = await_received(sum(PROMPT_TOKENS))
        finally:
            serve.shutdown()
            ray.shutdown()
    for prompt, answer, expected in zip(prompts, moved, alone, strict=True):
        print(f"{len(prompt)} tokens: {answer}, {'the same' if answer == expected else f'alone {expected}'}")
    print(f"the decode engine received {received:.0f} of {sum(PROMPT_TOKENS)} tokens")
    return int(moved != alone or received != sum(PROMPT_TOKENS))


def body(prompt: list[int]) -> dict[str, Any]:
    """Return a request for the greedy answer."""
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }


def ask_ingress(port: int, prompt: list[int]) -> list[int]:
    """Return the tokens that a client of the application gets."""
    response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body(prompt), timeout=300)
    return list(response.raise_for_status().json()["choices"][0]["token_ids"])


def ask_prefill_engine(prompt: list[int]) -> list[int]:
    """Return the tokens that the prefill engine computes without any transfer."""
    handle = serve.get_deployment_handle("Prefill:model", APPLICATION).options(stream=True)
    [response] = handle.completions.remote(CompletionRequest(**body(prompt)))
    return list(response.choices[0].token_ids)


def await_received(wanted: int) -> float:
    """Return the tokens that engines have received, as Ray exports them some seconds later."""
    [node] = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + METRICS_SECONDS
    while True:
        response = httpx.get(url, timeout=30)
        received = sum(float(value) for value in RECEIVED.findall(response.raise_for_status().text))
        if received >= wanted or time.monotonic() > deadline:
            return received
        time.sleep(1.0)


if __name__ == "__main__":
    signal.alarm(int(sys.argv[1]) if len(sys.argv) > 1 else 900)
    raise SystemExit(main())

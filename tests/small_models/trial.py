"""Tries a small model in a plain vLLM engine on a CPU, and keeps what came of it in a table.

Each model runs in a process of its own, forked from one that has imported vLLM, and is ended after a time limit. The
engine runs without kvferry's plugin.
"""

import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .shrink import VOCABULARY_SIZE, language_part, quantisation
from .weights import published, write_small_model

TABLE = Path(__file__).with_name("vllm_cpu.json")
"""Model -> whether vLLM's CPU build runs it, and in which dtype, or vLLM's reason for each dtype tried; for a quantised
model that does not run, the same without quantisation.

``first_tokens_matter``: a prompt with other first tokens gets another answer. ``different_tokens``: how many of an
answer's tokens differ from each other. ``amx``: what processors with AMX made of a model, where others did not make the
same of it: vLLM has other kernels there."""
LIMIT_SECONDS = 120.0
"""Of one engine and its two answers; most take 20 s. A dtype without a kernel of its own in vLLM takes minutes."""
NO_ANSWER = "no answer"
"""How the reason begins where the limit was over."""
CACHE_BYTES = 512 << 20
PROMPT_TOKENS, CHANGED_TOKENS, OUTPUT_TOKENS = 300, 40, 16
ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
    "VLLM_CPU_CI_ENV": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
MULTIMODAL = {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}}
# The same as in tests/host/vllm/engine_pool.py, which has the reasons.
MLA = {
    "attention_config": {"backend": "CPU_MLA"},
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}
STATES = ("mamba_d_conv", "ssm_state_size", "linear_conv_kernel_dim", "linear_attn_config", "conv_L_cache")
"""Fields of models with states, which run without prefix caching, as those of the engine pool do."""
DTYPES = ("float32", "bfloat16")
"""Types of the engine's computation, in the order in which they are tried."""


def engine_arguments(name: str, dtype: str) -> dict[str, Any]:
    """Return the keyword arguments of :class:`vllm.LLM`, without the model, that the small model ``name`` needs."""
    config = published(name)
    part = language_part(config)
    towers = any(field in config for field in ("vision_config", "audio_config"))
    return {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": dtype,
        "max_model_len": min(2048, part.get("n_positions", 2048)),
        "kv_cache_memory_bytes": CACHE_BYTES,
        "max_num_seqs": 16,
        **(MULTIMODAL if towers else {}),
        "enable_prefix_caching": not any(field in part for field in STATES),
        **(MLA if part.get("kv_lora_rank") else {}),
    }


def load_table() -> dict[str, Any]:
    """Return the table; empty where there is none."""
    return dict(json.loads(TABLE.read_text())) if TABLE.exists() else {}


def has_amx() -> bool:
    """Return whether this processor has AMX, for which vLLM has kernels of its own."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def outcome_of(name: str) -> dict[str, Any]:
    """Return what the table has of a model on a processor like this one."""
    found = load_table()[name]
    return dict(found["amx"]) if "amx" in found and has_amx() else found


def try_models(names: list[str], folder: Path) -> dict[str, Any]:
    """Try each of the models, one after the other, add the outcomes to the table, and return them."""
    os.environ.update(ENVIRONMENT)
    import vllm

    outcomes = {}
    for name in names:
        started_at = time.monotonic()
        outcomes[name] = outcome = {"vllm": vllm.__version__, **_try_model(name, folder)}
        table = load_table()
        former = {field: value for field, value in table.get(name, {}).items() if field != "amx"}
        # The outcome without AMX stays beside another one with AMX.
        table[name] = {**former, "amx": outcome} if has_amx() and former not in ({}, outcome) else outcome
        TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=2) + "\n")
        print(f"{name}: {outcome} ({time.monotonic() - started_at:.0f} s)", flush=True)
    return outcomes


def _try_model(name: str, folder: Path) -> dict[str, Any]:
    outcome = _try_weights(name, folder, quantised=True)
    if not outcome["runs"] and quantisation(published(name)) is not None:
        outcome["unquantised"] = _try_weights(name, folder, quantised=False)
    return outcome


def _try_weights(name: str, folder: Path, quantised: bool) -> dict[str, Any]:
    log = f"{name}{'' if quantised else '-unquantised'}"
    # Threads of a computation would not survive a fork, so this process computes nothing itself.
    write = partial(write_small_model, name, folder, quantised=quantised)
    written = _in_child(lambda: {"path": str(write())}, folder / f"{log}-write.log")
    if "path" not in written:
        return {"runs": False, "reasons": {"write_small_model": written["reason"]}}
    reasons = {}
    for dtype in DTYPES:
        arguments = engine_arguments(name, dtype)
        outcome = _in_child(partial(_run, written["path"], arguments), folder / f"{log}-{dtype}.log")
        if "reason" not in outcome:
            return {"runs": True, "dtype": dtype, **outcome, **({"reasons": reasons} if reasons else {})}
        reasons[dtype] = outcome["reason"]
    return {"runs": False, "reasons": reasons}


def _in_child(call: Callable[[], dict[str, Any]], log: Path) -> dict[str, Any]:
    """Return what ``call`` returns in a forked process, or the reason why there is nothing.

    The process leads a group, which is ended when the time is over.
    """
    answer = log.with_suffix(".json")
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        with log.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        try:
            outcome = call()
        except BaseException as error:  # vLLM's reason, whatever its type
            traceback.print_exc()
            said = str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
            outcome = {"reason": f"{type(error).__name__}: {_first_line(said)}"}
        answer.write_text(json.dumps(outcome))
        sys.stdout.flush()
        os._exit(0)
    deadline = time.monotonic() + LIMIT_SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"reason": f"{NO_ANSWER} after {LIMIT_SECONDS:.0f} s"}
        time.sleep(0.2)
    if not answer.exists():
        return {"reason": f"the process ended: {log.read_text().splitlines()[-1:]}"}
    return dict(json.loads(answer.read_text()))


def _run(path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    engine = LLM(model=path, **arguments)
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    numbers = random.Random(1)
    prompt = [numbers.randrange(2, 2000) for _ in range(PROMPT_TOKENS)]
    changed = [numbers.randrange(2, 2000) for _ in range(CHANGED_TOKENS)] + prompt[CHANGED_TOKENS:]
    # Each prompt alone.
    outputs = [
        list(engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0].outputs[0].token_ids)
        for tokens in (prompt, changed)
    ]
    assert all(len(tokens) == OUTPUT_TOKENS and max(tokens) < VOCABULARY_SIZE for tokens in outputs), outputs
    return {"first_tokens_matter": outputs[0] != outputs[1], "different_tokens": len(set(outputs[0]))}


def _first_line(text: str) -> str:
    """Return what vLLM says first; after a colon the next line too, and without pydantic's number of errors."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    index = next((number for number, line in enumerate(lines) if re.search(r"Value error|Error:", line)), 0)
    meant = " ".join(lines[index : index + (2 if lines[index:] and lines[index].endswith(":") else 1)])
    return re.sub(r"( Please check the logs.*)?( \[type=.*)", "", meant)[:300]

"""Writes docs/matrix.md from the tests' results in a folder: ``python -m tests.matrix_document FOLDER``.

Nothing here knows a result: a pair whose tests did not run is written as not run, one of which any failed as failed.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .host.vllm.engine_pool import ENGINES
from .host.vllm.handoffs import CONCURRENT_PAIRS, CONCURRENT_WAVE, FIRST_WAVE, NAMED_TOKENS, PAIRS, Pair
from .host.vllm.offloads import DOCUMENT_TOKENS, MOVED_AND_KEPT, NUM_ANSWERED, OFFLOADS, SHARED, Offload
from .matrix_refusals import REFUSALS, Refusal
from .matrix_results import REPOSITORY, Results

DOCUMENT = REPOSITORY / "docs" / "matrix.md"
COMMAND = "make test-matrix"
MODELS = {
    "gqa": "Qwen3, GQA",
    "fp8": "Qwen3, FP8",
    "mla": "DeepSeek V2",
    "gemma": "Gemma 3",
    "granite": "Granite 4",
    "deepseek": "DeepSeek V3",
    "six": "Qwen3, 6 KV heads",
    "mqa": "Qwen3, MQA",
    "lora": "Qwen3, LoRA",
    "gemma3n": "Gemma 3n",
    "gemma4": "Gemma 4",
    "gptoss": "gpt-oss",
    "qwennext": "Qwen3-Next, bfloat16",
}
TOKENS = "test_tokens_are_those_of_one_engine_alone"
CHECKS = {
    TOKENS: "tokens",
    "test_what_one_request_moves": "one request",
    "test_labels_arrive_whole_and_nowhere_else": "labels",
    "test_a_fault_in_the_transport_is_seen[swap]": "swapped blocks seen",
    "test_a_fault_in_the_transport_is_seen[drop]": "left-out bytes seen",
    "test_swapped_labels_are_noticed": "swapped labels seen",
}
"""The tests that every pair must pass; other tests count where they ran."""
BYTE_LABELS = ("one request", "labels", "swapped labels seen")
CHECKS_OF_BYTES = {name: label for name, label in CHECKS.items() if label in BYTE_LABELS}
"""The tests that a pair must pass whose tokens no engine alone computes."""
BYTES_ONLY = "passed, tokens not compared"
PAIR_COLUMNS = (
    *("pair", "model", "prefill", "decode", "block", "layout", "transport", "descriptors"),
    *("identical", "received/computed", "result"),
)
CONCURRENT_CHECKS = {
    "test_tokens_of_a_concurrent_router_are_those_of_one_engine": "tokens",
    "test_behind_vllm_router_as_it_is": "behind vllm-router",
    "test_tokens_depend_on_what_is_written": "a lost write seen",
}
"""The tests that every pair behind a concurrent router must pass."""
CONCURRENT_COLUMNS = ("pair", "model", "prefill", "decode", "transport", "shown besides", "result")
OFFLOAD_CHECKS = {
    "test_a_second_pass_computes_almost_nothing": "second pass",
    "test_prompts_around_a_block": "prompts around a block",
    "test_after_sigkill_blocks_come_from_disk": "after SIGKILL",
}
"""The tests that every pair of an engine that stores and one that loads must pass."""
OFFLOAD_COLUMNS = (
    *("pair", "model", "stored by", "loaded by", "block", "layout", "identical"),
    *("second pass: computed", "after SIGKILL: computed", "after SIGKILL: from disk", "result"),
)
SHARED_CHECKS = {
    "test_a_second_engine_loads_what_the_first_has_stored": "second engine",
    "test_a_salt_keeps_blocks_apart_in_the_pool": "another salt",
    "test_a_flipped_byte_in_the_pool_is_a_miss": "a flipped byte",
}
"""The tests that every pair of engines with a pool must pass."""
SHARED_COLUMNS = (
    *("pair", "model", "stored by", "loaded by", "block", "layout", "identical"),
    *("second engine: computed", "from the pool", "damaged prompt: computed", "result"),
)
BOTH_CHECKS = {
    "test_two_connectors_in_one_engine": "a few prompts",
    "test_many_requests_leave_nothing": "many requests",
}
"""The tests of two engines that have both connectors."""
BOTH_COLUMNS = (
    *("pair", "model", "prefill", "decode", "identical", "given up", "seconds"),
    *("prefill: computed/from tiers/cached", "decode: computed/received/cached", "evicted", "result"),
)
REFUSAL_COLUMNS = ("combination", "refused by", "code that must come", "result")


TEXT = """# What works between which engines

Written by `{command}` from what its tests measured; not to be edited. Engines are real vLLM on a CPU, in float32 unless
the model's name says otherwise, with tiny random models. \
Of {num_pairs} combinations {num_passed} passed, of {num_concurrent} behind a concurrent router {num_written}, \
of {num_offloads} offloads {num_offloaded}, of {num_shared} through a pool {num_found}; of \
{num_refusals} that must be refused {num_refused} were, with their code. What ran:

{runs}

## Sequential: combinations that must work

A passed pair gave for every request the tokens of one engine that never received a cache. {at_once} of the requests
were sent at once, with prompts of {shortest} to {longest} tokens. Received and computed tokens are the decode
engine's own count. Labels written through one engine's own views were found through the other's, each once. Each
negative control was seen: blocks swapped, bytes left out, labels swapped. Block (in tokens; of attention where there
are states), layout, transport and descriptors are those of one request of {named_tokens} tokens, over all decode
ranks; where the two engines differ, both are named. Requests of a model in bfloat16 are sent one by one, and its tokens
are compared only where both engines have equally many ranks: [why](support.md#gated-delta-nets-on-a-cpu).

{pairs}

## Concurrent: combinations that must work

The prefill engine writes while it computes. {written_at_once} prompts of {shortest_written} to {longest_written}
tokens, all at once, gave the tokens of one engine that never received a cache: behind a router of the tests' own, which
sends to both engines at once, and behind vllm-router unmodified, in its mooncake mode. The decode engine counted every
token as received, but for the last one of models with windows or states. A write that was silently left out showed in
the tokens.

{concurrent}

## Blocks that must be found again

An engine with `KVFerryOffloadConnector`, whose own cache is too small for {documents} documents, gets {questions}
prompts twice. It is killed by SIGKILL, one byte of each block of one more prompt is changed on disk, and another engine
gets all prompts with the same disk folder. Each request gave the tokens of an engine without offload, the one with the
changed blocks too; none failed. Computed tokens are the engine's own count, in parts of all prompt tokens.

{offloads}

## Blocks that another engine must find

Two engines with `KVFerryOffloadConnector` run at the same time and share a pool. The second gets the {questions}
prompts that the first has computed, and loads each of their blocks from the pool once. Of one more prompt a byte of
each block is changed in the memory that the first engine lends: the second computes that prompt. With another
`cache_salt` it computes too. All tokens are those of an engine without offload. The part from the pool is what a
request waited for itself.

{shared}

## Both connectors in one engine

Two engines with `KVFerryConnector` and `KVFerryOffloadConnector` under vLLM's `MultiConnector`, whose own caches hold
fewer than two of the longest prompts, and host memory not all prompts. Of the {num_answered} requests that are
answered most are handed from one engine to the other, and one in eight goes to the decode engine alone; others are
given up while they are computed, loaded or answered. Then no engine keeps a block, a hold, a pin or a store
for any request.

{both}

## Combinations that must be refused

Each with a stable code and a remedy, before a byte moves.

{refusals}
"""


def shape_of(engine: str) -> str:
    """Return the parallel shape of an engine of the tests.

    >>> shape_of("gqa-tp4"), shape_of("gqa-dp2")
    ('TP 4', 'DP 2 x TP 1')
    """
    settings = ENGINES[engine][1]
    outer = {"DP": settings.get("data_parallel_size", 1), "PP": settings.get("pipeline_parallel_size", 1)}
    sizes = [(name, size) for name, size in outer.items() if size > 1]
    return " x ".join(f"{name} {size}" for name, size in (*sizes, ("TP", settings.get("tensor_parallel_size", 1))))


def result_of(found: dict[str, Any], checks_of_all: Mapping[str, str] = CHECKS) -> str:
    """Return the outcome of a pair's tests; every pair must pass ``checks_of_all``.

    >>> result_of({}), result_of({"checks": {TOKENS: {"outcome": "failed", "message": "tokens differ | for 2"}}})[:36]
    ('not run', '**failed**: tokens (tokens differ fo')
    """
    checks = {name: check for name, check in found.get("checks", {}).items() if check["outcome"] != "skipped"}
    if not checks:
        return "not run"
    failed = {name: check["message"] for name, check in checks.items() if check["outcome"] != "passed"}
    if failed:
        labels = [f"{checks_of_all.get(name, name)} ({first_line(failed[name])})" for name in failed]
        return "**failed**: " + "; ".join(labels)
    missing = [label for name, label in checks_of_all.items() if name not in checks]
    return f"in part: {', '.join(missing)} not run" if missing else "passed"


def first_line(message: str, most_characters: int = 120) -> str:
    """Return the beginning of a message in a form for a table."""
    line = (message.strip().splitlines() or [""])[0]
    return line.replace("|", "").replace("  ", " ")[:most_characters]


def both(values: Sequence[Any]) -> str:
    """Return the common value of both engines, or both values."""
    unique = dict.fromkeys(map(str, values))
    return " to ".join(map(str, values)) if len(unique) > 1 else next(iter(unique), "")


def identical(answers: Mapping[str, int], of: str = "requests") -> str:
    """Return how many answers had the tokens that they must have, of how many; empty without a measurement.

    >>> identical({"requests": 41, "identical": 40}), identical({})
    ('40/41', '')
    """
    return f"{answers['identical']}/{answers[of]}" if answers else ""


def pair_row(pair: Pair, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a pair; cells without a measurement are empty."""
    measured = found.get("measured", {})
    traffic = measured.get("traffic", {})
    return (
        pair.name,
        MODELS[pair.model],
        shape_of(pair.prefill),
        shape_of(pair.decode),
        both(measured.get("block_sizes", ())),
        both(measured.get("layouts", ())),
        measured.get("transport", ""),
        f"{measured['descriptors']:,}" if "descriptors" in measured else "",
        identical(traffic),
        f"{traffic['received']:,}/{traffic['computed']:,}" if traffic else "",
        pair_result(pair, found),
    )


def pair_result(pair: Pair, found: dict[str, Any]) -> str:
    """Return how a pair's tests ended, and whether they compare its tokens."""
    if pair.is_compared:
        return result_of(found)
    result = result_of(found, CHECKS_OF_BYTES)
    return BYTES_ONLY if result == "passed" else result


def concurrent_row(pair: Pair, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a pair behind a concurrent router."""
    settings = ENGINES[pair.prefill][1]
    passed = [name for name, check in found.get("checks", {}).items() if check["outcome"] == "passed"]
    besides = {
        name.removeprefix("test_").partition("[")[0].replace("_", " ")
        for name in passed
        if name not in CONCURRENT_CHECKS
    }
    return (
        pair.name,
        MODELS[pair.model] + (", compiled" if "TORCHDYNAMO_DISABLE" in settings.get("variables", {}) else ""),
        shape_of(pair.prefill),
        shape_of(pair.decode),
        pair.transport,
        "; ".join(sorted(besides)),
        result_of(found, CONCURRENT_CHECKS),
    )


def _stored_and_loaded(pair: Offload, measured: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells that name the pair, its engines and their caches."""
    shapes = shape_of(pair.stores), shape_of(pair.loads)
    return pair.name, MODELS[pair.model], *shapes, str(measured.get("block_size", "")), measured.get("layout", "")


def offload_row(pair: Offload, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a pair of which one engine stores and the other loads."""
    measured = found.get("measured", {})
    second, third = measured.get("second", {}), measured.get("third", {})
    counts = ("requests", "identical")
    return (
        *_stored_and_loaded(pair, measured),
        identical({name: second[name] + third[name] for name in counts} if second and third else {}),
        *(f"{sent['computed'] / sent['tokens']:.3f}" if sent else "" for sent in (second, third)),
        f"{third['disk'] / third['tokens']:.3f}" if third else "",
        result_of(found, OFFLOAD_CHECKS),
    )


def shared_row(pair: Offload, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a pair of engines that share a pool."""
    measured = found.get("measured", {})
    second, damaged = measured.get("second", {}), measured.get("damaged", {})
    return (
        *_stored_and_loaded(pair, measured),
        identical(second),
        *(f"{second[name] / second['tokens']:.3f}" if second else "" for name in ("computed", "pool")),
        f"{damaged['computed'] / damaged['tokens']:.3f}" if damaged else "",
        result_of(found, SHARED_CHECKS),
    )


def both_row(pair: Pair, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of two engines that have both connectors."""
    measured = found.get("measured", {})
    many = measured.get("many", {})
    sides = [(measured.get(f"{side}_tokens", {}), names) for side, names in SIDES.items()]
    return (
        pair.name,
        MODELS[pair.model],
        shape_of(pair.prefill),
        shape_of(pair.decode),
        identical({**many, "identical": measured["identical"]} if many else {}, "answered"),
        str(sum(number for kind, number in many.items() if kind.startswith("given up"))) if many else "",
        str(many.get("seconds", "")),
        *("/".join(f"{moved.get(name, 0):,}" for name in names) if moved else "" for moved, names in sides),
        "/".join(f"{moved.get('evicted', 0):,}" for moved, _ in sides if moved),
        result_of(found, BOTH_CHECKS),
    )


SIDES = {"prefill": ("computed", "host", "cached"), "decode": ("computed", "received", "cached")}
"""The counts of tokens that are shown of each engine that has both connectors."""


def refusal_row(refusal: Refusal, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a refused combination."""
    came = found.get("found", "")
    result = ("refused" if came == refusal.reason else f"**failed**: `{came}`") if found else "not run"
    return refusal.combination, refusal.where, f"`{refusal.reason}`", result


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    head, *lines = (f"| {' | '.join(line)} |" for line in (columns, *rows))
    return "\n".join([head, f"|{'---|' * len(columns)}", *lines])


def runs(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield on what the results were measured, each tree and set of versions once."""
    known = dict.fromkeys(
        (ran["tree"], ran["day"], ", ".join(f"{name} {number}" for name, number in ran["versions"].items()))
        for ran in (each["ran"] for each in found if each)
    )
    for tree, day, versions in known:
        yield f"* commit {tree}, {day}: {versions}"


def document(results: Results) -> str:
    """Return the text of docs/matrix.md."""
    pairs = [(pair, results.pair(pair.name)) for pair in PAIRS]
    concurrent = [(pair, results.pair(pair.name)) for pair in CONCURRENT_PAIRS]
    offloads = [(pair, results.pair(pair.name)) for pair in OFFLOADS]
    shared = [(pair, results.pair(pair.name)) for pair in SHARED]
    both_connectors = results.pair(MOVED_AND_KEPT.name)
    refusals = [(refusal, results.refusal(refusal.name)) for refusal in REFUSALS]
    found_in_pool = [shared_row(*each) for each in shared]
    written = [concurrent_row(*each) for each in concurrent]
    offloaded = [offload_row(*each) for each in offloads]
    rows, refused = [pair_row(*each) for each in pairs], [refusal_row(*each) for each in refusals]
    return TEXT.format(
        command=COMMAND,
        num_pairs=len(rows),
        num_passed=sum(row[-1] in ("passed", BYTES_ONLY) for row in rows),
        num_concurrent=len(written),
        num_written=sum(row[-1] == "passed" for row in written),
        num_offloads=len(offloaded),
        num_offloaded=sum(row[-1] == "passed" for row in offloaded),
        num_refusals=len(refused),
        num_refused=sum(row[-1] == "refused" for row in refused),
        num_shared=len(found_in_pool),
        num_found=sum(row[-1] == "passed" for row in found_in_pool),
        runs="\n".join(runs([found for _, found in (*pairs, *concurrent, *offloads, *shared, *refusals)]))
        or "Nothing has run.",
        at_once=len(FIRST_WAVE),
        shortest=min(map(len, FIRST_WAVE)),
        longest=max(map(len, FIRST_WAVE)),
        named_tokens=NAMED_TOKENS,
        written_at_once=len(CONCURRENT_WAVE),
        shortest_written=min(map(len, CONCURRENT_WAVE)),
        longest_written=max(map(len, CONCURRENT_WAVE)),
        pairs=table(PAIR_COLUMNS, rows),
        concurrent=table(CONCURRENT_COLUMNS, written),
        documents=len(DOCUMENT_TOKENS),
        questions=len(OFFLOADS[0].prompts()),
        offloads=table(OFFLOAD_COLUMNS, offloaded),
        shared=table(SHARED_COLUMNS, found_in_pool),
        num_answered=NUM_ANSWERED,
        both=table(BOTH_COLUMNS, [both_row(MOVED_AND_KEPT, both_connectors)]),
        refusals=table(REFUSAL_COLUMNS, refused),
    )


def main(folder: str) -> None:
    """Write the document from the results in ``folder``."""
    DOCUMENT.write_text(document(Results(REPOSITORY / Path(folder))))


if __name__ == "__main__":
    main(sys.argv[1])

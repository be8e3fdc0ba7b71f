"""``kvferry plan``: its figures, its text and its refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvferry.cli.plan import plan
from kvferry.cli.plan_report import Blocks, make_report, parse_engine
from kvferry.errors import KVFerryError, Reason
from kvferry.models.config import MAX_CONFIG_BYTES
from kvferry.models.families import caches_of
from kvferry.plan import planner

SHAPE = "--layers 36 --kv-heads 8 --head-size 128 --dtype bfloat16 --block-size 16"
BYTES_PER_TOKEN = 36 * 8 * 2 * 128 * 2
GQA = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
}
MLA = {
    "model_type": "deepseek_v2",
    "dtype": "bfloat16",
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def invoke(function: Any, arguments: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(function)
    return CliRunner().invoke(app, arguments.split())


def planned(arguments: str) -> dict[str, Any]:
    result = invoke(plan, arguments + " --json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.output)
    return report


@pytest.mark.parametrize(
    ("layout", "prefill", "decode", "blocks", "tokens", "descriptors"),
    [
        ("BHLNC", 1, 1, "contiguous", 10240, 1),
        ("BHLNC", 1, 1, "descending", 10240, 1),
        ("BHLNC", 1, 1, "scattered", 10240, 640),
        ("BHLNC", 2, 1, "scattered", 10240, 1280),
        ("BHLNC", 1, 2, "scattered", 10240, 1280),
        ("LBHNC", 1, 1, "scattered", 10240, 23040),
        ("LBHNC", 1, 1, "contiguous", 10240, 36),
        ("BHLNC", 1, 1, "scattered", 1024, 64),
        ("BHLNC", 1, 1, "scattered", 16, 1),
    ],
)
def test_descriptors(layout: str, prefill: int, decode: int, blocks: str, tokens: int, descriptors: int) -> None:
    engines = f"--prefill tp={prefill},layout={layout} --decode tp={decode},layout={layout}"
    report = planned(f"{SHAPE} --tokens {tokens} {engines} --blocks {blocks}")
    assert report["descriptors"] == descriptors
    assert report["bytes"] == tokens * BYTES_PER_TOKEN
    assert report["verified"] is True
    assert len(report["pairs"]) == max(prefill, decode)
    for pair in report["pairs"]:
        assert pair["verified"] is True
        assert sum(run["count"] for run in pair["run_lengths"]) == pair["descriptors"]
        assert sum(run["count"] * run["length"] for run in pair["run_lengths"]) == pair["bytes"]
    assert sum(pair["descriptors"] for pair in report["pairs"]) == descriptors


@pytest.mark.parametrize(
    ("engines", "layouts", "descriptors", "per_layer"),
    [
        ("--prefill tp=2", ("LBHNC", "LBHNC"), 2 * 8, 2 * 8 * 36),
        # A stage needs half of the layers: a run for each of 8 heads and 2 stages.
        ("--decode tp=2,pp=2", ("LBHNC", "LBHNC"), 8 * 2 * 8, 2 * 8 * 36),
        # Between layouts that order heads and tokens differently, each token of a head moves alone in either case.
        ("--decode layout=BLNHC", ("LBHNC", "LBNHC"), 8 * 16 * 8 * 36, 8 * 16 * 8 * 36),
        ("--prefill layout=LBHNC --decode layout=LBHNC", ("LBHNC", "LBHNC"), 8 * 36, 8 * 36),
    ],
)
def test_per_layer_layouts_are_counted_beside_the_plan(
    engines: str, layouts: tuple[str, str], descriptors: int, per_layer: int
) -> None:
    report = planned(f"{SHAPE} --tokens 128 {engines}")
    assert report["per_layer"] == {
        "layouts": dict(zip(("prefill", "decode"), layouts, strict=True)),
        "descriptors": per_layer,
    }
    assert report["descriptors"] == descriptors
    groups = [group for pair in report["pairs"] for group in pair["groups"]]
    assert sum(group["per_layer_descriptors"] for group in groups) == per_layer
    assert report["bytes_per_token"] == BYTES_PER_TOKEN


def test_descriptors_of_per_layer_layouts_that_are_too_many_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_DESCRIPTORS", 64 * 36 - 1)
    report = planned(f"{SHAPE} --tokens 1024 --bandwidth 10")
    assert report["descriptors"] == 64
    assert report["per_layer"]["descriptors"] is None
    assert report["pairs"][0]["groups"][0]["per_layer_descriptors"] is None
    assert report["predicted"]["per_layer_seconds"] is None
    assert "not counted" in report["notes"][-1]
    assert "2304 descriptors" in report["notes"][-1]
    monkeypatch.setattr(planner, "MAX_DESCRIPTORS", 64 * 36)
    assert planned(f"{SHAPE} --tokens 1024")["per_layer"]["descriptors"] == 64 * 36


@pytest.mark.parametrize(
    ("engines", "busiest_bytes", "busiest_descriptors", "per_layer"),
    [
        # Each of two senders has half of the bytes; the one receiver has all, and submits nothing.
        ("--prefill tp=2", 1024 * BYTES_PER_TOKEN, 0, 0),
        ("--decode tp=2", 1024 * BYTES_PER_TOKEN, 128, 128 * 36),
        ("--prefill tp=2 --decode tp=2", 512 * BYTES_PER_TOKEN, 64, 64 * 36),
    ],
)
def test_the_predicted_time_is_that_of_the_busiest_rank(
    engines: str, busiest_bytes: int, busiest_descriptors: int, per_layer: int
) -> None:
    link = f"--bandwidth 10 --per-descriptor {1 if per_layer else 0}"
    predicted = planned(f"{SHAPE} --tokens 1024 {engines} {link}")["predicted"]
    assert predicted["bandwidth"] == 10e9
    assert predicted["seconds"] == pytest.approx(busiest_bytes / 10e9 + busiest_descriptors * 1e-6)
    assert predicted["per_layer_seconds"] == pytest.approx(busiest_bytes / 10e9 + per_layer * 1e-6)
    assert planned(f"{SHAPE} --tokens 1024 {engines}")["predicted"] is None


def test_the_table_says_time_and_replicas(tmp_path: Path) -> None:
    text = invoke(plan, f"{SHAPE} --tokens 1024 --prefill tp=2 --bandwidth 25 --per-descriptor 5").output
    assert "at 25 GB/s and 5 us per descriptor: 6.0 ms, per layer 14.5 ms" in text
    assert "replicas: none, so all bytes are sent once" in text
    assert f"bytes per token: {BYTES_PER_TOKEN:,} " in text
    (tmp_path / "config.json").write_text(json.dumps(MLA))
    text = invoke(plan, f"--model {tmp_path} --tokens 64 --prefill tp=4 --decode tp=2").output
    assert "latent heads 0:1 of mla: on 4 prefill ranks, one of which sends to each receiver; on 2 decode ranks" in text
    assert "so sent 2 times" in text
    assert "predicted" not in text


@pytest.mark.parametrize(
    ("engines", "replicas"),
    [
        ("--prefill tp=8 --decode tp=4", [(4, 2, 2)]),
        ("--prefill tp=2,pp=2 --decode tp=4", [(1, 2, 2)]),
        ("--prefill tp=4 --decode tp=2,pp=2", [(2, 1, 1)]),
    ],
)
def test_replicas_are_counted_for_each_layer(engines: str, replicas: list[tuple[int, int, int]]) -> None:
    report = planned(f"--layers 4 --kv-heads 2 --head-size 64 --tokens 64 {engines}")
    counted = [(each["num_prefill_ranks"], each["num_decode_ranks"], each["times_sent"]) for each in report["replicas"]]
    assert counted == replicas
    assert [(each["groups"], each["heads"]) for each in report["replicas"]] == [(["full"], [[0, 2]])]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens", [32, 48, 1600])
def test_scattered_blocks_have_no_neighbours(tokens: int, seed: int) -> None:
    report = planned(f"{SHAPE} --tokens {tokens} --blocks scattered --seed {seed}")
    assert report["descriptors"] == tokens // 16


def test_a_replicated_engine_sends_each_head_once() -> None:
    report = planned("--layers 2 --kv-heads 2 --head-size 64 --tokens 64 --prefill tp=8 --decode tp=1")
    assert len(report["pairs"]) == 2
    report = planned("--layers 2 --kv-heads 2 --head-size 64 --tokens 64 --prefill tp=1 --decode tp=8")
    assert report["bytes"] == 8 * 64 * 2 * 2 * 64 * 2


def test_block_sizes_may_differ() -> None:
    report = planned(f"{SHAPE} --tokens 100 --prefill tp=2,block_size=32 --decode tp=4,layout=LBNHC")
    assert report["bytes"] == 100 * BYTES_PER_TOKEN
    assert report["verified"] is True


def test_pipeline_stages_send_their_own_layers() -> None:
    """37 layers over two stages are 19 and 18: what is left over goes to the stage before the last."""
    shape = "--layers 37 --kv-heads 8 --head-size 128 --tokens 160"
    report = planned(f"{shape} --prefill tp=2,pp=2 --decode pp=2,block-size=32")
    assert report["verified"] is True
    assert len(report["pairs"]) == 4
    assert {pair["prefill_rank"]: pair["decode_rank"] for pair in report["pairs"]} == {0: 0, 1: 0, 2: 1, 3: 1}
    page = 160 * 4 * 2 * 128 * 2
    assert [pair["bytes"] for pair in report["pairs"]] == [19 * page, 19 * page, 18 * page, 18 * page]
    report = planned(f"{shape} --prefill layers=20+17 --decode tp=1")
    assert [pair["bytes"] for pair in report["pairs"]] == [2 * 20 * page, 2 * 17 * page]


def test_explanation_names_sources_runs_and_refusals() -> None:
    explained = planned("--layers 2 --kv-heads 2 --head-size 64 --tokens 64 --prefill tp=4 --explain")["explanation"]
    text = "\n".join(explained)
    assert "one of 2 ranks that hold them, by selector 0" in text
    assert "run of 8.0 KiB, all joined" in text
    assert text.endswith("refused or changed: nothing")
    assert "other patterns" not in text
    assert "explanation" not in planned("--layers 2 --kv-heads 2 --head-size 64 --tokens 64")


def test_model_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GQA))
    assert planned(f"--model {path} --tokens 1024")["bytes"] == 1024 * BYTES_PER_TOKEN
    assert planned(f"--model {tmp_path} --tokens 1024 --dtype float32")["bytes"] == 2048 * BYTES_PER_TOKEN
    path.write_text(json.dumps({"text_config": GQA}))
    assert planned(f"--model {path} --tokens 1024")["bytes"] == 1024 * BYTES_PER_TOKEN
    path.write_text(json.dumps(MLA))
    report = planned(f"--model {path} --tokens 64 --prefill tp=4 --decode tp=1")
    assert report["bytes"] == 64 * 27 * 576 * 2
    assert len(report["pairs"]) == 1


def test_a_plan_says_what_read_the_shapes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GQA))
    report = planned(f"--model {path} --tokens 64 --prefill tp=2")
    assert report["shapes"].startswith("LlamaConfig of transformers ")
    assert [(group["kv_heads"], group["head_size"], group["itemsize"]) for group in report["groups"]] == [(8, 128, 2)]
    page = 16 * 8 * 2 * 128 * 2
    assert report["engines"]["decode"]["page_bytes"] == page
    assert report["engines"]["prefill"]["block_bytes"] == 36 * page // 2
    assert "shapes of the caches: LlamaConfig of transformers " in invoke(plan, f"--model {path} --tokens 64").output
    assert planned(f"{SHAPE} --tokens 64")["shapes"] == "given by hand"
    assert "shapes of the caches: given by hand" in planned(f"{SHAPE} --tokens 64 --explain")["explanation"]


LONG = 2048
"""Tokens of a request beyond every window below; a multiple of the blocks."""


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [
        ("meta-llama/Llama-3.1-8B", 131_072),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 131_072),
        ("Llama-3.3-70B", 327_680),
        ("meta-llama/Llama-3.2-1B-Instruct", 32_768),
        ("meta-llama/Llama-3.2-3B-Instruct", 114_688),
        ("Qwen/Qwen3-0.6B", 114_688),
        ("Qwen/Qwen3-4B-Thinking-2507", 147_456),
        ("Qwen/Qwen3-14B", 163_840),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", 192_512),
        ("Qwen/Qwen2.5-0.5B-Instruct", 12_288),
        ("Qwen/Qwen2.5-1.5B-Instruct", 28_672),
        ("Qwen/Qwen2.5-3B-Instruct", 36_864),
        ("Qwen/Qwen2.5-14B-Instruct", 196_608),
        ("Qwen/Qwen2.5-32B-Instruct", 262_144),
        ("Qwen/Qwen2.5-72B-Instruct", 327_680),
        ("mistralai/Mixtral-8x7B-v0.1", 131_072),
        ("deepseek-ai/DeepSeek-V3-0324", 61 * 576 * 2),
        ("moonshotai/Kimi-K2-Instruct-0905", 61 * 576 * 2),
        # Of a window the last tokens alone are moved: 128 of a half of the layers, 1024 of five in six, and 16 that a
        # window which begins within a block reaches into.
        ("openai/gpt-oss-20b", 2 * 8 * 64 * 2 * (12 + 12 * 128 / LONG)),
        ("google/gemma-3-4b-it", 2 * 4 * 256 * 2 * (5 + 29 * 1024 / LONG)),
        ("google/gemma-3-27b-it", 2 * 16 * 128 * 2 * (10 + 52 * 1024 / LONG)),
    ],
)
def test_public_models_have_their_known_bytes_per_token(model: str, bytes_per_token: float) -> None:
    report = planned(f"--model {model} --tokens {LONG}")
    assert report["bytes_per_token"] == bytes_per_token
    assert report["shapes"].startswith("the published ")


def test_a_folder_of_that_name_comes_before_the_public_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(GQA))
    monkeypatch.chdir(tmp_path)
    assert planned("--model Qwen/Qwen3-0.6B --tokens 64")["shapes"].startswith("LlamaConfig")


def test_named_links() -> None:
    predicted = planned(f"{SHAPE} --tokens 1024 --link 400g --per-descriptor 2")["predicted"]
    assert predicted == planned(f"{SHAPE} --tokens 1024 --bandwidth 50 --per-descriptor 2")["predicted"]


def refusal(arguments: str) -> dict[str, str]:
    """Return the JSON error, once the command without --json has raised the same one."""
    result = invoke(plan, arguments + " --json")
    assert result.exit_code == 2, result.output
    error: dict[str, str] = json.loads(result.output)["error"]
    raised = invoke(plan, arguments).exception
    assert isinstance(raised, KVFerryError)
    assert raised.reason.value == error["reason"]
    return error


@pytest.mark.parametrize(
    ("arguments", "reason", "hint"),
    [
        (f"{SHAPE} --prefill pt=2", Reason.UNKNOWN_SETTING, "There are tp, "),
        (f"{SHAPE} --decode tp=1,blocksize=32", Reason.UNKNOWN_SETTING, "'block_size'"),
        (f"{SHAPE} --prefill layout=BHLCN", Reason.UNKNOWN_LAYOUT, "'BHLNC'"),
        (f"{SHAPE} --prefill tp=0", Reason.INVALID_SETTING, "above zero"),
        (f"{SHAPE} --prefill tp", Reason.INVALID_SETTING, "tp=VALUE"),
        (f"{SHAPE} --prefill tp=3", Reason.INDIVISIBLE_HEADS, "8"),
        ("--layers 2 --kv-heads 2 --head-size 8 --dtype bfloat", Reason.INVALID_SETTING, "'bfloat16'"),
        (f"{SHAPE} --prefill pp=2,layers=20", Reason.INVALID_SETTING, "every stage"),
        (f"{SHAPE} --prefill layers=20+15", Reason.INVALID_SETTING, "every stage"),
        (f"{SHAPE} --prefill pp=37", Reason.INVALID_LAYOUT, "no more stages"),
        (f"{SHAPE} --prefill tp=512,pp=3", Reason.INVALID_SETTING, "At most 1024"),
        (f"{SHAPE} --per-descriptor 2", Reason.INVALID_SETTING, "--bandwidth"),
        (f"{SHAPE} --link 400 --per-descriptor 2", Reason.INVALID_SETTING, "'400g'"),
        (f"{SHAPE} --link 400g --bandwidth 50", Reason.INVALID_SETTING, "one of them"),
        ("--layers 2", Reason.INVALID_SETTING, "--model"),
        ("--model /nowhere/config.json", Reason.INVALID_SETTING, "models are not fetched"),
        ("--model Qwen/Qwen3-9B", Reason.INVALID_SETTING, "Did you mean 'Qwen/Qwen3-"),
        ("--model deepseek-ai/DeepSeek-V3.2", Reason.UNSUPPORTED, "docs/models.md"),
    ],
)
def test_refusals(arguments: str, reason: Reason, hint: str) -> None:
    error = refusal(arguments)
    assert error["reason"] == reason.value
    assert hint in error["remedy"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"] * 18}, "layer_types"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"model_type": "unheard_of"}, "unheard_of"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForTelepathy"]}, "Qwen2ForTelepathy"),
        ({"quantization_config": {"kv_cache_scheme": "static"}}, "kv_cache_scheme"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "index_topk": 2048}, "index_topk"),
    ],
    ids=str,
)
def test_a_field_that_hints_at_another_cache_is_refused(changes: dict[str, object], field: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GQA, **changes}))
    error = refusal(f"--model {path}")
    assert error["reason"] == Reason.UNSUPPORTED.value
    assert repr(field) in error["message"]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("{", "not a model configuration"),
        ("[" * 100_000, "not a model configuration"),
        ("\udcff", "not a model configuration"),
        ("[1]", "no JSON object"),
        (" " * (MAX_CONFIG_BYTES + 1), "bytes"),
        (json.dumps({**GQA, "num_hidden_layers": None}), "'num_hidden_layers'"),
        (json.dumps({**GQA, "num_key_value_heads": "8"}), "num_key_value_heads"),
        (json.dumps({**GQA, "num_key_value_heads": [8, 4]}), "num_key_value_heads"),
        (json.dumps({**GQA, "dtype": None}), "'dtype'"),
        (json.dumps({**GQA, "model_type": "gpt_oss", "layer_types": ["full_attention"]}), "layer_types"),
    ],
    ids=lambda value: value[:40],
)
def test_a_configuration_that_cannot_be_read(text: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    error = refusal(f"--model {path}")
    assert error["reason"] == Reason.INVALID_SETTING.value
    assert hint in error["message"]


def test_a_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GQA, "sliding_window": 4096, "use_sliding_window": False}))
    assert planned(f"--model {path} --tokens 16")["descriptors"] == 1


def test_table_names_the_totals() -> None:
    result = invoke(plan, f"{SHAPE} --tokens 1024 --prefill tp=2")
    assert result.exit_code == 0
    assert "128" in result.output
    assert "144.0 MiB" in result.output


def test_every_list_is_announced_before_it_is_made() -> None:
    announced: list[str] = []
    caches = caches_of(None, 2, 4, 8, "bfloat16")
    engines = parse_engine("--prefill", "tp=2", 16), parse_engine("--decode", "tp=1", 16)
    make_report(caches, *engines, 64, Blocks.SCATTERED, announce=announced.append)
    assert announced == [
        "decode rank 0 of 1: planning",
        "decode rank 0 of 1: the list from prefill rank 0 of 2",
        "decode rank 0 of 1: the list from prefill rank 1 of 2",
        "decode rank 0 of 1: all lists together",
        "decode rank 0 of 1: the lists of per-layer layouts",
    ]

"""The demo's closed forms and its problems."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.cli.console import open_console
from kvferry.cli.demo_report import (
    MAX_LOG_PROBLEMS,
    CacheShape,
    DemoReport,
    RequestLine,
    read_failures,
    read_log_problems,
    read_transfer_log,
)
from kvferry.harness.launch import PromptTokens
from kvferry.models.groups import AttentionCache

GQA = 8, AttentionCache(num_kv_heads=4, head_size=64, itemsize=4)
MLA = 4, AttentionCache(num_kv_heads=1, head_size=576, itemsize=4, is_latent=True)


@pytest.mark.parametrize(
    ("layers", "prefill_tp", "decode_tp", "bytes_per_token", "num_rank_pairs"),
    [
        (GQA, 1, 1, 8 * 4 * 2 * 64 * 4, 1),
        (GQA, 2, 1, 8 * 4 * 2 * 64 * 4, 2),
        (GQA, 4, 2, 8 * 4 * 2 * 64 * 4, 4),
        (GQA, 1, 2, 8 * 4 * 2 * 64 * 4, 2),
        (GQA, 1, 8, 8 * 8 * 2 * 64 * 4, 8),  # four heads on eight ranks: each is held twice
        (GQA, 8, 1, 8 * 4 * 2 * 64 * 4, 4),  # of two prefill ranks with the same head, one sends
        (MLA, 2, 1, 4 * 576 * 4, 1),
        (MLA, 1, 2, 2 * 4 * 576 * 4, 2),
    ],
)
def test_closed_forms(
    layers: tuple[int, AttentionCache], prefill_tp: int, decode_tp: int, bytes_per_token: int, num_rank_pairs: int
) -> None:
    shape = CacheShape(*layers, 16, prefill_tp, decode_tp)
    assert shape.expected_bytes(16) == 16 * bytes_per_token
    assert shape.expected_bytes(17) == 32 * bytes_per_token
    assert shape.per_layer_descriptors(33) == layers[0] * 3 * num_rank_pairs


def good_report() -> DemoReport:
    shape = CacheShape(*GQA, 16, 2, 1)
    lines = tuple(
        RequestLine(
            received_tokens=tokens,
            bytes=shape.expected_bytes(tokens),
            descriptors=4,
            wait_seconds=0.01,
            transfer_seconds=0.001,
            transport="cma",
            layout="BHLNC",
            prompt_tokens=tokens,
            identical=True,
            error=None,
        )
        for tokens in (10, 100)
    )
    return DemoReport(
        lines,
        shape,
        "BHLNC",
        received=PromptTokens(received=110, cached=0, computed=0),
        reference=PromptTokens(received=0, cached=0, computed=110),
        cache_usages={"prefill": 0.0, "decode": 0.0},
        seconds_until_free=0.1,
    )


def test_a_good_run_has_no_problem() -> None:
    report = good_report()
    assert report.problems == []
    assert report.to_json()["bytes"] == report.to_json()["expected_bytes"] == 8 * 16 * 8 * 4 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"identical": False}, "requests [1] differ"),
        ({"received_tokens": 98}, "computed more than one prompt token of requests [1]"),
        ({"error": "HTTP 500"}, "request 1: HTTP 500"),
        ({"bytes": 4096}, "bytes moved, the sizes of the caches give"),
        ({"received_tokens": 90}, "count 110 received tokens, the transfers 100"),
    ],
)
def test_what_is_wrong_with_a_request_is_found(change: dict[str, object], problem: str) -> None:
    report = good_report()
    report = replace(report, lines=(report.lines[0], replace(report.lines[1], **change)))
    assert any(problem in found for found in report.problems)


def test_without_a_closed_form_bytes_are_counted_but_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(good_report(), shape=CacheShape(0, None, 16, 2, 1))
    found = report.to_json()
    assert (report.problems, found["expected_bytes"], found["per_layer_descriptors"]) == ([], None, None)
    assert found["bytes"] > 0
    report.print(open_console())
    assert "no closed form for the caches" in capsys.readouterr().out


def test_rounded_tokens_may_differ_but_nothing_else_may(capsys: pytest.CaptureFixture[str]) -> None:
    different = tuple(replace(line, identical=False) for line in good_report().lines)
    report = replace(good_report(), is_exact=False, lines=different, preemptions=3)
    assert (report.problems, report.to_json()["tokens_compared"]) == ([], False)
    assert replace(report, lines=(different[0], replace(different[1], bytes=64))).problems
    report.print(open_console())
    printed = capsys.readouterr().out
    assert "are not compared" in printed
    assert "3 preemptions." in printed


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cache_usages": {"prefill": 0.01, "decode": 0.0}}, "still in use"),
        ({"processes_left": 1}, "1 processes are left"),
        ({"received": PromptTokens(received=110, cached=0, computed=3)}, "count 3 computed tokens"),
        (
            {"reference": PromptTokens(received=0, cached=10, computed=100)},
            "did not compute all prompts of the reference",
        ),
        ({"failures": ("rank 0 did not load x: it was lost.",)}, "rank 0 did not load x: it was lost."),
    ],
)
def test_what_is_wrong_with_a_run_is_found(change: dict[str, object], problem: str) -> None:
    assert any(problem in found for found in replace(good_report(), **change).problems)


def test_a_problem_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    changed = replace(good_report().lines[1], error="HTTP 500: no answer. [deadline-exceeded]")
    report = replace(good_report(), lines=(good_report().lines[0], changed))
    report.print(open_console())
    assert "no answer. [deadline-exceeded]" in capsys.readouterr().out


def test_ranks_are_added_up(tmp_path: Path) -> None:
    line = {"request_id": "a", "num_tokens": 5, "bytes": 64, "descriptors": 2, "transport": "cma", "layout": "BHLNC"}
    for rank, seconds in enumerate((0.25, 0.5)):
        entry = {**line, "error": None, "wait_seconds": seconds, "transfer_seconds": seconds / 2}
        failed = {**entry, "rank": rank, "error": "peer-died", "message": "it has exited.", "bytes": 1000}
        text = "\n".join(json.dumps(part) for part in (failed, entry))
        (tmp_path / f"log.rank{rank}").write_text(text + "\n")
    moved = read_transfer_log(tmp_path / "log")["a"]
    assert (moved.received_tokens, moved.bytes, moved.descriptors) == (5, 128, 4)
    assert (moved.wait_seconds, moved.transfer_seconds, moved.transport) == (0.5, 0.25, "cma")
    assert read_failures(tmp_path / "log") == tuple(f"rank {rank} did not load a: it has exited." for rank in (0, 1))


def test_the_last_errors_of_the_logs_are_read(tmp_path: Path) -> None:
    log = tmp_path / "decode.log"
    log.write_text("ERROR one\nWARNING of vllm\nWARNING kvferry: two\nINFO kvferry: fine\n")
    assert read_log_problems([log]) == ("decode.log: ERROR one", "decode.log: WARNING kvferry: two")
    log.write_text("ERROR first\n" + "ERROR again\n" * MAX_LOG_PROBLEMS)
    assert read_log_problems([log]) == ("decode.log: ERROR again",) * MAX_LOG_PROBLEMS

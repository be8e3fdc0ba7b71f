"""The timeline of loads between real ranks in this process, from the events that they give."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.timeline_jobs import Job, Kind, Wanted, find, jobs
from kvferry.cli.transfer_records import open_logs
from kvferry.execution.executor import JobResult

from .engines_in_process import LAYERS
from .engines_that_write import Batches, Pairs, engines
from .test_writes import await_announcement, step

__all__ = ["engines"]

AHEAD = 12345.0
"""Seconds by which the sources' monotonic clock is ahead where they stand for ranks of another host."""


def line(result: JobResult, **more: Any) -> dict[str, Any]:
    """Return the fields of a line that the timeline reads; the log itself needs vLLM."""
    moved = {"bytes": int(result.num_bytes), "descriptors": result.num_descriptors, "transport": result.transport}
    return {"rank": 0, **more, **moved, "error": None, "message": None, "events": result.events}


def of_another_host(value: Any) -> Any:
    """Return a record with its times as a host whose clock is ahead would give them."""
    if isinstance(value, dict):
        changed = {key: each if key == "wall" else of_another_host(each) for key, each in value.items()}
        return changed | ({"boot": "another"} if "boot" in value else {})
    if isinstance(value, list):
        return [of_another_host(each) for each in value]
    return value + AHEAD if isinstance(value, float) else value


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_real_events_of_both_sides_are_in_order(is_elsewhere: bool, engines: Pairs, tmp_path: Path) -> None:
    sender, [receiver] = engines.open(source_tp=2, batches=Batches.SPANS)
    receiver.receive(sender.hold(), [0, 3], job_id="cmpl-1")
    for rank in sender.ranks:
        await_announcement(rank)
        step(rank, "x", [5, 1], seconds_per_layer=0.01)
    lines = {"d": [line(receiver.result(), request_id="cmpl-1")]}
    for index, rank in enumerate(sender.ranks):
        [result] = sender.written(1) if not index else rank.executor.collect(5.0)
        written = [*({"rank": 0, **each} for each in rank.writer.take_steps()), line(result, write=result.job_id)]
        lines[f"p{index}"] = [of_another_host(each) if is_elsewhere else each for each in written]
    for name, of_rank in lines.items():
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in of_rank))
    logs, wanted = open_logs([tmp_path / name for name in lines]), Wanted("cmpl-1", 9)
    found = find(logs, wanted)
    drawn = list(jobs(logs, found, wanted))
    assert (found.num_pairs, found.unpaired_loads, found.unpaired_writes) == (2, 0, 0)
    assert [(each.broken, each.half) for each in found.lines.values()] == [(0, 0)] * 3
    assert len(found.alignment.clocks) == 1 + is_elsewhere
    for clock in found.alignment.clocks[1:]:
        offset = found.alignment.offset(clock, drawn[0].whole.began)
        assert offset.lowest <= (AHEAD if clock != "another" else -AHEAD) <= offset.highest
    check_order(drawn)


def check_order(drawn: list[Job]) -> None:
    [load] = [job for job in drawn if job.whole.kind is Kind.LOAD]
    writes = [job for job in drawn if job.whole.kind is Kind.WRITE]
    assert len(writes) == len([job for job in drawn if job.whole.kind is Kind.STEP]) == 2
    for job in writes:
        waited, *moved, reported = (part.kind for part in job.parts)
        assert (waited, reported) == (Kind.WAIT, Kind.REPORT)
        # A busy machine may find two layers done, and write both at once.
        assert moved == [Kind.MOVE] * len(moved)
        assert 0 < len(moved) <= len(LAYERS)
        assert load.whole.began <= job.whole.began < job.whole.ended <= load.whole.ended
        [computed] = [job_of for job_of in drawn if job_of.whole.kind is Kind.STEP and job_of.log == job.log]
        assert {part.kind for part in computed.parts} == {Kind.LAYERS}
        assert 0 < len(computed.parts) <= len(LAYERS)
        assert computed.parts[0].ended <= job.parts[1].began
    at = {(arrow.name, arrow.is_sent): arrow.at for job in drawn for arrow in job.arrows}
    assert len(at) == 8
    assert all(at[name, True] <= at[name, False] for name, _ in at)

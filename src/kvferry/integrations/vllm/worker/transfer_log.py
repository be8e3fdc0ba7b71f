"""One JSON line per load and rank, and of pushes per push and step of a rank, for people and programs."""

import json
from collections.abc import Mapping
from typing import Any, TextIO

from kvferry.execution.job import JobResult
from kvferry.integrations.vllm.step import LoadOrder
from kvferry.layout.named_layouts import NamedLayout


class TransferLog:
    """Appends to ``<path>.rank<rank>``; an empty path logs nothing.

    Ranks are counted over the pipeline's stages, those of one stage by their tensor-parallel rank.
    """

    def __init__(self, path: str, rank: int, layout: NamedLayout) -> None:
        self._file: TextIO | None = open(f"{path}.rank{rank}", "a", buffering=1) if path else None  # noqa: SIM115
        self._rank = rank
        self._layout = layout

    def write(self, order: LoadOrder, result: JobResult) -> None:
        """Append one load."""
        if self._file is None:
            return
        hold = order.hold
        line: dict[str, Any] = {
            "request_id": order.request_id,
            "remote_request_id": None if hold is None else hold.handle.request_id,
            "remote_engine_id": None if hold is None else hold.engine_id,
            "rank": self._rank,
            "num_tokens": order.num_tokens,
            "bytes": result.num_bytes,
            "staged_bytes": result.num_staged_bytes,
            "descriptors": result.num_descriptors,
            "sources": result.num_sources,
            "transport": result.transport,
            "layout": self._layout.value,
            "wait_seconds": result.wait_seconds,
            "transfer_seconds": result.transfer_seconds,
            "error": None if result.error is None else result.error.reason.value,
            "message": None if result.error is None else str(result.error),
        }
        if result.events is not None:
            line["events"] = result.events
        self._file.write(json.dumps(line) + "\n")

    def write_push(self, result: JobResult) -> None:
        """Append one push of this rank to one rank of a receiver, as its sender saw it."""
        if self._file is None:
            return
        line = {
            "push": result.job_id,
            "rank": self._rank,
            "bytes": result.num_bytes,
            "descriptors": result.num_descriptors,
            "transport": result.transport,
            "layout": self._layout.value,
            "transfer_seconds": result.transfer_seconds,
            "error": None if result.error is None else result.error.reason.value,
            "message": None if result.error is None else str(result.error),
            "events": result.events,
        }
        self._file.write(json.dumps(line) + "\n")

    def write_step(self, step: Mapping[str, Any]) -> None:
        """Append one step of this rank that has computed prompts which are pushed."""
        if self._file is not None:
            self._file.write(json.dumps({"rank": self._rank, **step}) + "\n")

    def close(self) -> None:
        """Close the file; twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None

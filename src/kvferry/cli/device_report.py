"""``kvferry doctor --device cuda:0``: the trials at start, in a small cache of each layout, without an engine.

``handoff`` is that of ``KVFerryConnector``, ``offload`` that of ``KVFerryOffloadConnector``.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from kvferry.cli.console import open_console, progress
from kvferry.errors import KVFerryError, Reason, TransportError
from kvferry.execution.cuda_driver import CudaDevice, find_device
from kvferry.layout.named_layouts import NamedLayout

if TYPE_CHECKING:
    from kvferry.execution.trial import TrialResult

NO_ORDER = (
    "network cards' writes are not ordered before kernels on this device (GPU_DIRECT_RDMA_WRITES_ORDERING is none): "
    "over RDMA use a device and a platform that order them"
)


@dataclass(frozen=True, slots=True)
class TriedLayout:
    """One layout and use: how long the bytes took there and back, or why they did not come back right."""

    layout: str
    use: str
    works: bool
    seconds: float = 0.0
    transport: str = ""
    reason: str = ""
    found: str = ""
    remedy: str = ""


def report_device(device: str, transport: str, json_output: bool) -> int:
    """Run the trials, print, and return the exit code. Raises :class:`KVFerryError` where the device cannot be used."""
    # Before torch, whose import takes seconds.
    found = find_device(device)
    with progress(f"moving labelled blocks on {device}"):
        rows = list(_try_layouts(device, transport))
    works = all(row.works for row in rows)
    if json_output:
        described = {"device": device, **asdict(found), "works": works, "trials": [asdict(row) for row in rows]}
        print(json.dumps(described, indent=2))
    else:
        _print(device, found, rows)
    return 0 if works else 1


def _try_layouts(device: str, transport: str) -> Iterator[TriedLayout]:
    import torch

    from kvferry.execution.device import device_order
    from kvferry.execution.device_trial import try_device
    from kvferry.tiers.slab_trial import try_offload
    from kvferry.transport.registry import open_transports

    if torch.version.cuda is None:
        raise TransportError(
            Reason.MISSING_DEPENDENCY,
            f"{device} cannot be used: the installed torch {torch.__version__} is built without CUDA.",
            "Run this in the environment of the engine that runs on the device.",
        )
    order = device_order([device])
    opens = partial(open_transports, transport)
    trials: dict[str, Callable[[NamedLayout], TrialResult]] = {
        "handoff": partial(try_device, order, opens=opens),
        "offload": partial(try_offload, order),
    }
    for layout in NamedLayout:
        for use, trial in trials.items():
            try:
                result = trial(layout)
            except KVFerryError as error:
                yield TriedLayout(
                    layout, use, works=False, reason=error.reason, found=error.message, remedy=error.remedy
                )
            else:
                yield TriedLayout(layout, use, works=True, seconds=result.seconds, transport=result.transport)


def _print(device: str, found: CudaDevice, rows: list[TriedLayout]) -> None:
    table = Table("layout", "use", "result", "what to do", title=f"{device}: {found.name}")
    for row in rows:
        result = f"[green]{row.seconds:.2f} s over {row.transport}[/]" if row.works else f"[red]{escape(row.found)}[/]"
        table.add_row(row.layout, row.use, result, escape(row.remedy))
    console = open_console()
    console.print(table)
    if not found.sees_rdma_writes:
        console.print(f"[yellow]{NO_ORDER}[/]")

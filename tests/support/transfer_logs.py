"""Transfer logs of made-up hosts, each with a clock of its own: what the ranks of both engines say about loads."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvferry.cli.transfer_records import Log, open_logs

Line = tuple["Host", float, dict[str, Any]]
"""A record, with the rank's host and the true time of its end."""


class Host:
    """A host whose monotonic clock shows ``offset`` at time 0 and gains ``drift`` seconds in a second.

    ``log`` is the name of a rank's log; without one it is that of the host.
    """

    def __init__(
        self, name: str, offset: float = 0.0, drift: float = 0.0, wall_error: float = 0.0, log: str = ""
    ) -> None:
        self.name, self.offset, self.drift, self.wall_error = name, offset, drift, wall_error
        self.log = log or name

    def at(self, time: float) -> float:
        return self.offset + time * (1 + self.drift)

    def true(self, monotonic: float) -> float:
        return (monotonic - self.offset) / (1 + self.drift)

    def clock(self, time: float) -> dict[str, Any]:
        return {"wall": 1.7e9 + time + self.wall_error, "monotonic": self.at(time), "boot": self.name}


def load_lines(
    number: int,
    began: float,
    target: Host,
    sources: Sequence[Host],
    delay: Callable[[], float],
    request_id: str = "",
    *,
    compute: Callable[[], float] | None = None,
    batches: Sequence[Sequence[str]] = (("a.0",), ()),
    num_tokens: int = 32,
    batch_bytes: int = 4096,
    transport: str = "cma",
) -> list[Line]:
    """Return the records of one load: of the destination rank, and of each source's write and step.

    ``delay`` gives the seconds that messages and batches take, ``compute`` those after which the next batch can be
    written. ``batches`` are the layers of each; none are all layers.
    """
    name, transfer, compute = f"write {number} to d/0 7", f"transfer-{number}", compute or delay
    announced, done, of_source, lines = {}, {}, {}, []
    for index, source in enumerate(sources):
        now = announced[index] = began + delay()
        now = stepped = heard = now + delay()
        moved, ran_at, written = 0.0, {}, []
        for layers in batches:
            posted = now + compute()
            now = posted + delay()
            moved += now - posted
            spans = [{"group": "0", "layers": [*layers], "tokens": [0, num_tokens]}]
            times = {"posted_at": source.at(posted), "landed_at": source.at(now)}
            written.append({**times, "bytes": batch_bytes, "descriptors": 1, "spans": spans})
            ran_at.update({layer: source.at(posted) for layer in layers[-1:]})
        reported = now + delay()
        events = {
            "transfer_id": transfer, "receiver": "d/0", "source_index": index, "num_tokens": num_tokens,
            "clock": source.clock(reported), "announced_at": source.at(heard), "batches": written,
            "batches_left_out": 0, "reported_at": source.at(reported),
        }  # fmt: skip
        size = {"bytes": batch_bytes * len(batches), "descriptors": len(batches), "transport": transport}
        lines.append(
            (source, reported, {"rank": index, "write": name, **size, "error": None, "message": None, "events": events})
        )
        step = {"step_began_at": source.at(stepped), "prompts": {transfer: num_tokens}, "clock": source.clock(now)}
        lines.append((source, now, {"rank": index, **step, "ran_at": ran_at, "step_ended_at": source.at(now)}))
        done[index] = reported + delay()
        of_source[index] = {"post": now - heard - moved, "move": moved, "confirm": reported - now}
    committed = max(done.values()) + delay()
    last = max(done, key=done.__getitem__)
    way = done[last] - announced[last] - sum(of_source[last].values())
    phases = {"find": announced[last] - began, "announce": way, **of_source[last]}
    phases["confirm"] += committed - done[last]
    events = {
        "clock": target.clock(committed), "write": name, "transfer_id": transfer, "ordered_at": target.at(began),
        "announced_at": {str(index): target.at(time) for index, time in announced.items()},
        "done_at": {str(index): target.at(time) for index, time in done.items()},
        "committed_at": target.at(committed), "phases": phases,
    }  # fmt: skip
    load = {
        "rank": 0, "request_id": request_id or f"cmpl-{number}", "num_tokens": num_tokens, "transport": transport,
        "bytes": batch_bytes * len(batches) * len(sources), "descriptors": len(batches) * len(sources),
        "wait_seconds": committed - began, "phases": {**phases, "next_step": delay()}, "error": None,
    }  # fmt: skip
    return [*lines, (target, committed, {**load, "message": None, "events": events})]


def scheduler_lines(of_load: Sequence[Line], source: Host, target: Host) -> list[Line]:
    """Return what the schedulers of both engines say about a load with these records: the hold began 2 ms before the
    load, the decode engine runs the request 1 ms after it, and has a token 3 ms later.
    """
    [(_, committed, load)] = [line for line in of_load if "request_id" in line[2]]
    events = load["events"]
    ordered = target.true(events["ordered_at"])
    prefill, decode = (
        Host(each.name, each.offset, each.drift, log=f"{each.log}.scheduler") for each in (source, target)
    )
    hold = {
        "hold": events["transfer_id"], "request_id": f"prefill-{load['request_id']}", "ending": "released",
        "began_at": source.at(ordered - 0.002), "first_step_at": source.at(ordered - 0.001),
        "first_token_at": source.at(committed - 0.0005), "held_at": source.at(committed),
        "clock": source.clock(committed + 0.005),
    }  # fmt: skip
    loaded = {
        "loaded": events["transfer_id"], "request_id": load["request_id"], "ordered_at": target.at(ordered),
        "first_step_at": target.at(committed + 0.001), "first_token_at": target.at(committed + 0.004),
        "clock": target.clock(committed + 0.004),
    }  # fmt: skip
    return [(prefill, committed + 0.005, hold), (decode, committed + 0.004, loaded)]


def write_logs(folder: Path, lines: Sequence[Line]) -> list[Log]:
    """Write the log of each host's rank, in the order of time."""
    texts: dict[str, list[str]] = {}
    for host, _, line in sorted(lines, key=lambda each: each[1]):
        texts.setdefault(host.log, []).append(json.dumps(line) + "\n")
    for name, text in texts.items():
        (folder / name).write_text("".join(text))
    return open_logs([folder / name for name in texts])


def sample_lines() -> list[Line]:
    """Return the records of two prompts of a model with 32 layers, written by two prefill ranks on one host while they
    compute, to a decode rank on another.
    """
    drawn = random.Random(11)
    target = Host("decode-host", 86_000.0, log="decode.log.rank0")
    sources = [Host("prefill-host", 5_200_000.0, log=f"prefill.log.rank{rank}") for rank in range(2)]
    batches = [[f"model.layers.{layer + part}.self_attn.attn" for part in range(4)] for layer in range(0, 32, 4)]
    lines = []
    for number, began in enumerate((1.0, 1.4)):
        lines += load_lines(
            number, began, target, sources, lambda: 0.0004 + 0.003 * drawn.random(),
            f"cmpl-{drawn.getrandbits(64):016x}-0", compute=lambda: 0.009 + 0.003 * drawn.random(),
            batches=batches, num_tokens=4096, batch_bytes=4 * 4096 * 2048,
            transport="nixl",
        )  # fmt: skip
    return lines

"""A campaign of faults against one engine with tiers: what is injected, what is sent, and what must hold after each.

The engine fails a request whose load fails (``kv_load_failure_policy`` ``fail``). Its own cache is forgotten before
each request, its host memory holds a few prompts, its disk more, and all prompts together more than the disk. After
each fault: every request ended with the tokens of an engine without offload, no block landed with bytes that were never
stored under its key, the folder never occupied more than its cap, and nothing is pinned, kept or moving.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ....local.pool_master import Master
from ..handoffs import random_prompt
from .disk_folder import Damage, DiskFolder, put_back, tables_of
from .faulty_os import Fault
from .outcomes import Outcome
from .processes import Ended, Process, Processes
from .watched_tiers import bytes_on_disk

BLOCK_TOKENS, MAX_TOKENS = 32, 6
BLOCK_BYTES = BLOCK_TOKENS * (16 << 10)
"""Of qwen3-tiny in float32."""
HOST_BLOCKS, DISK_BLOCKS, ENGINE_BLOCKS = 24, 64, 64
DISK_BYTES = DISK_BLOCKS * BLOCK_BYTES
POOL_BYTES = 48 << 20
DOCUMENTS, QUESTIONS, DOCUMENT_BLOCKS, MOST_KNOWN = 5, 3, 4, 36
FULL_DISK_BYTES = DISK_BYTES // 2
LIMIT_BYTES = 2 << 20
DEADLINES = {
    "stall_seconds": 0.25,
    "hang_seconds": 0.6,
    "suspend_seconds": 0.1,
    "retry_seconds": 0.2,
    "fault_seconds": 0.6,
}
"""Of the tiers, shorter than an engine's that serves; a fault stays for ``fault_seconds`` after the last request."""
WAIT_SECONDS, HANG_SECONDS = 0.5, 1.5
"""How long a request waits for its blocks, and how long a call hangs."""

Known = tuple[int, str]
"""The number of a prompt and its salt."""
Injection = Callable[[Outcome], None]
"""Injects one fault, and notes what it did."""


class Campaign:
    """One engine and its reference; :meth:`inject` injects one fault of a kind.

    ``verifies`` False switches the comparison of checksums off, in the engine, to see that the campaign notices.
    """

    def __init__(self, folder: Path, model: Path, seed: int, *, verifies: bool = True) -> None:
        self.folder, self.model, self.verifies = folder, model, verifies
        self.random = random.Random(seed)
        self.prompts = [
            random_prompt(1000 + document, DOCUMENT_BLOCKS * BLOCK_TOKENS)
            + random_prompt(2000 + 10 * document + question, BLOCK_TOKENS + 7 * question + 1)
            for document in range(DOCUMENTS)
            for question in range(QUESTIONS)
        ]
        self.known: list[Known] = []
        """Prompts whose blocks may be stored, those that were used last at the end."""
        self.num_salts = 0
        self.outcomes: list[Outcome] = []
        self.most_bytes = 0
        self._keys: dict[Known, list[bytes]] = {}
        self._life: Process | None = None
        self._has_pool = False
        self.master: Master | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes = Processes.start(self.folder)
        try:
            self.expected = self._reference_tokens()
            order = {**self._engine(), "transfer": self._transfer()}
            self.engine = self.processes.fork(self.processes.program, order, "engine")
        except BaseException:
            self.processes.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.processes.stop()
        if self.master is not None:
            self.master.kill()

    # Engines.

    def _engine(self) -> dict[str, Any]:
        return {
            "model": str(self.model),
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": ENGINE_BLOCKS * BLOCK_BYTES,
        }

    def _transfer(self) -> dict[str, Any]:
        own = {"host_bytes": HOST_BLOCKS * BLOCK_BYTES, "loads": "always", "load_wait_seconds": WAIT_SECONDS}
        return {
            "kv_connector": "KVFerryOffloadConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {**own, "disk_path": str(self.folder / "disk"), "disk_bytes": DISK_BYTES},
        }

    def _reference_tokens(self) -> list[list[int]]:
        """Return the tokens of each prompt from an engine without offload."""
        engine = self.processes.fork(self.processes.program, self._engine(), "engine")
        life = self.processes.fork(engine, {"max_tokens": MAX_TOKENS, **DEADLINES}, "life")
        tokens = []
        for number, prompt in enumerate(self.prompts):
            [output] = life.call("send", prompts=[(prompt, f"reference {number}")])["outputs"]
            assert (output["finish"], output["cached"]) == ("length", 0), output
            tokens.append(output["tokens"])
        life.kill()
        engine.kill()
        return tokens

    def live(self, **differences: Any) -> Process:
        """Return the engine's life, a new one if there is none; ``differences`` are for a new one only."""
        if self._life is not None and not differences:
            return self._life
        self.end_life()
        order = {
            "max_tokens": MAX_TOKENS,
            "disk_path": str(self.folder / "disk"),
            "disk_bytes": DISK_BYTES,
            "pool_master": "",
            "pool_bytes": 0,
            "stored_bytes": str(self.folder / "stored-bytes"),
            "verifies": self.verifies,
            "fault": None,
            **DEADLINES,
            **differences,
        }
        self._life = self.processes.fork(self.engine, order, "life")
        return self._life

    def end_life(self) -> None:
        """Kill the engine, if it lives."""
        if self._life is not None:
            self._life.kill()
            self._life, self._has_pool = None, False

    # Requests.

    def fresh(self, number: int) -> list[Known]:
        """Return prompts that no tier has: with a new salt."""
        self.num_salts += 1
        return [(self.random.randrange(len(self.prompts)), f"salt {self.num_salts}") for _ in range(number)]

    def on_disk(self, most: int = 3) -> list[Known]:
        """Return known prompts with blocks that would be loaded from the disk; store some where there are too few."""
        for _ in range(6):
            if found := self._below_host():
                return self.random.sample(found, min(len(found), self.random.randint(1, most)))
            self._send(self.fresh(4))
        raise AssertionError("nothing stays on disk")

    def _below_host(self) -> list[Known]:
        life = self.live()
        places = life.call("where", keys=[self.keys(known) for known in self.known])
        return [known for known, of_known in zip(self.known, places, strict=True) if of_known[:1] == [1]]

    def keys(self, known: Known) -> list[bytes]:
        """Return the keys of a prompt's blocks."""
        if known not in self._keys:
            number, salt = known
            [self._keys[known]] = self.live().call("keys", prompts=[(self.prompts[number], salt)])
        return self._keys[known]

    def _send(self, chosen: Sequence[Known], fault: Fault | None = None) -> dict[str, Any]:
        self._begin(chosen, fault)
        return self._end(chosen)

    def _begin(self, chosen: Sequence[Known], fault: Fault | None) -> None:
        prompts = [(self.prompts[number], salt) for number, salt in chosen]
        self.live().begin("send", prompts=prompts, fault=None if fault is None else asdict(fault))

    def _end(self, chosen: Sequence[Known]) -> dict[str, Any]:
        answer: dict[str, Any] = self.live().answer()
        self.known = [known for known in self.known if known not in chosen] + list(chosen)
        for forgotten in self.known[:-MOST_KNOWN]:
            self._keys.pop(forgotten, None)
        del self.known[:-MOST_KNOWN]
        return answer

    def send(
        self, chosen: Sequence[Known], outcome: Outcome, fault: Fault | None = None, meanwhile: Damage | None = None
    ) -> None:
        """Send prompts, and note what became of them; ``meanwhile`` happens some milliseconds later."""
        self._begin(chosen, fault)
        if meanwhile is not None:
            time.sleep(self.random.random() * 0.04)
            meanwhile(self.disk())
        self._note(outcome, chosen, self._end(chosen))

    def _note(self, outcome: Outcome, chosen: Sequence[Known], answer: dict[str, Any]) -> None:
        counts: Mapping[str, int] = answer["counts"]
        outcome.met += answer["met"]
        for (number, _), output in zip(chosen, answer["outputs"], strict=True):
            outcome.requests += 1
            outcome.tokens += output["prompt"]
            outcome.cached += output["cached"]
            has_ended = output["finish"] == "length"
            outcome.failed_requests += not has_ended
            outcome.wrong_tokens += has_ended and output["tokens"] != self.expected[number]
        outcome.failed_requests += counts.get("failed loads", 0)
        outcome.wrong_blocks += counts.get("wrong blocks", 0)
        outcome.loaded += sum(number for name, number in counts.items() if name.endswith(" loaded"))
        for name, number in counts.items():
            if name.startswith("failed: ") and number:
                outcome.failed_blocks[name.removeprefix("failed: ")] += number
        if not answer["quiet"]:
            outcome.kept.append("something moves without end")
        outcome.kept += [f"{name}: {what}" for name, what in answer["kept"].items()]

    # Faults.

    def inject(self, kind: str, injection: Injection, *, with_pool: bool = False) -> Outcome:
        """Inject one fault, into an engine with a pool or without, and return what it did."""
        outcome, began_at = Outcome(kind), time.monotonic()
        if with_pool:
            self._begin_with_pool()
        elif self._has_pool:
            self.end_life()
        try:
            injection(outcome)
            self._check_cap(outcome)
        except Ended:
            outcome.failed_requests += 1
            outcome.kept.append("the engine has ended")
            self._life = None
        outcome.seconds = time.monotonic() - began_at
        self.outcomes.append(outcome)
        with (self.folder / "outcomes").open("a") as file:
            file.write(f"{len(self.outcomes)} {outcome}\n")
        return outcome

    def _check_cap(self, outcome: Outcome) -> None:
        found = bytes_on_disk(self.folder / "disk")
        if self._life is not None:
            found = max(found, self._life.call("most_on_disk"))
        self.most_bytes = max(self.most_bytes, found)
        outcome.over_cap += found > DISK_BYTES

    def disk(self, wanted: Sequence[Known] = ()) -> DiskFolder:
        """Return the folder, with the places of the blocks of these prompts."""
        folder = DiskFolder(self.folder / "disk", self.random)
        if wanted:
            places = folder.places()
            keys = [key for known in wanted for key in self.keys(known)]
            folder.wanted = [places[key] for key in keys if key in places]
        return folder

    def reads_fail(self, fault: Fault, outcome: Outcome) -> None:
        """A request needs blocks whose reads fail; afterwards it comes again."""
        chosen = self.on_disk()
        self._vary(fault)
        self.send(chosen, outcome, fault)
        self.send(chosen[:1], outcome)

    def _vary(self, fault: Fault) -> None:
        """Choose which calls meet a fault, how many, and what becomes of them."""
        fault.skip, fault.times = self.random.choice([0, 0, 0, 1]), self.random.choice([1, 2, 8])
        fault.place, fault.seconds = self.random.random(), HANG_SECONDS

    def opens_fail(self, fault: Fault, outcome: Outcome) -> None:
        """A new life cannot open the files that a request needs, and later it can."""
        chosen = self.on_disk()
        self.restart(outcome)
        fault.times = self.random.choice([1, 2, 8])
        self.send(chosen, outcome, fault)
        self.send([*chosen[:1], *self.fresh(1)], outcome)

    def index_cannot_be_read(self, fault: Fault, outcome: Outcome) -> None:
        """A new life reads the index wrongly, or not at all."""
        chosen = self.on_disk()
        self.end_life()
        fault.skip, fault.place = self.random.randrange(8), self.random.random()
        started = self.live(fault=asdict(fault)).hello["started"]
        outcome.lives += 1
        outcome.met += started["refused"]
        for known in (chosen, [*chosen[:1], *self.fresh(1)]):
            self.send(known, outcome)
        if started["state"] != "ready":  # it serves without offload; the next one does not
            self.restart(outcome)

    def headers_fail(self, fault: Fault, outcome: Outcome) -> None:
        """Headers of records cannot be written, or are written wrongly; a new life reads them."""
        self.writes_fail(fault, outcome)
        self.restart(outcome)
        self.send(self.random.sample(self.known, 3), outcome)

    def writes_fail(self, fault: Fault, outcome: Outcome) -> None:
        """New blocks cannot be written, or are written wrongly; their prompts come again, and others."""
        chosen = self.fresh(self.random.randint(1, 3))
        self._vary(fault)
        self.send(chosen, outcome, fault)
        self.send([*self.fresh(2)], outcome)
        self.send([*chosen[:1], *self.on_disk(2)], outcome)

    def blocks_damaged(self, damage: Damage, outcome: Outcome) -> None:
        """Blocks that a request needs are damaged, before it comes or while it waits."""
        chosen = self.on_disk()
        if self.random.random() < 0.7:
            damage(self.disk(chosen))
            self.send(chosen, outcome)
        else:
            folder = self.disk(chosen)
            self.send(chosen, outcome, meanwhile=lambda _: damage(folder))
        outcome.met += sum(outcome.failed_blocks.values())
        self.send(chosen[:1], outcome)

    def files_damaged(self, damage: Damage, outcome: Outcome) -> None:
        """Files go, the engine serves on, and after a new start it stores again."""
        chosen = self.on_disk()
        damage(self.disk(chosen))
        self.send(chosen, outcome)
        self.send(self.fresh(2), outcome)
        outcome.met += sum(outcome.failed_blocks.values())
        self._check_cap(outcome)
        self.restart(outcome)
        self.send([*chosen, *self.fresh(1)], outcome)

    def index_damaged(self, damage: Damage, outcome: Outcome) -> None:
        """The engine is killed, what its next life reads first is damaged, and known prompts come again."""
        chosen = self.on_disk()
        folder = self.disk(chosen)
        self.end_life()
        num_blocks = len(folder.places())
        damage(folder)
        num_found = self.restart(outcome)
        self.send(chosen, outcome)
        self.send(self.random.sample(self.known, 2), outcome)
        outcome.met += num_blocks - num_found + sum(outcome.failed_blocks.values())

    def index_older_than_blocks(self, outcome: Outcome) -> None:
        """The tables are those of a while ago; since then other blocks were written into their cells."""
        chosen = self.on_disk()
        folder = self.disk()
        tables = tables_of(folder)
        for _ in range(3):
            self.send(self.fresh(4), outcome)
        self.end_life()
        put_back(folder, tables)
        self.restart(outcome)
        for known in (chosen, self.random.sample(self.known, 4)):
            self.send(known, outcome)
        outcome.met += sum(outcome.failed_blocks.values())

    def smaller_cap(self, outcome: Outcome) -> None:
        """The engine starts again with a smaller cap, which it obeys at once; then with the old one."""
        chosen = self.on_disk()
        self.end_life()
        cap = self.random.randrange(DISK_BYTES // 4, DISK_BYTES)
        life = self.live(disk_bytes=cap)
        outcome.lives += 1
        outcome.met += 1
        self.send([*chosen, *self.fresh(1)], outcome)
        outcome.over_cap += max(bytes_on_disk(self.folder / "disk"), life.call("most_on_disk")) > cap
        self.restart(outcome)
        self.send(chosen, outcome)

    def killed(self, fault: Fault | None, outcome: Outcome) -> None:
        """The engine is killed while it writes, by the fault or at some time; its next life serves the same prompts."""
        if fault is not None and fault.call == "posix_fallocate":
            self.end_life()
            shutil.rmtree(self.folder / "disk")
        earlier, chosen = self.on_disk(), self.fresh(3)
        if fault is not None:
            fault.skip = self.random.randrange(2 if fault.call == "posix_fallocate" else 4)
        self._begin([*earlier, *chosen], fault)
        if fault is None:
            time.sleep(self.random.random() * 0.25)
            self.end_life()
            outcome.met += 1
        else:
            try:
                self._end([*earlier, *chosen])
            except Ended:
                outcome.met += 1
            self.end_life()
        self.restart(outcome)
        self.send([*earlier[:2], *chosen[:2]], outcome)

    def files_limited(self, outcome: Outcome) -> None:
        """The kernel refuses writes beyond a length of files (``RLIMIT_FSIZE``)."""
        life = self.live()
        life.limit_files(LIMIT_BYTES)
        try:
            self.send(self.fresh(3), outcome)
            self.send(self.on_disk(), outcome)
        finally:
            life.limit_files(None)
        outcome.met += sum(outcome.failed_blocks.values())
        self.send(self.on_disk(), outcome)

    def segments_cannot_be_made(self, fault: Fault, outcome: Outcome) -> None:
        """A new life in an empty folder cannot make its files; later it can."""
        self.end_life()
        shutil.rmtree(self.folder / "disk")
        self.live()
        outcome.lives += 1
        fault.times, fault.skip = self.random.choice([1, 2, 8]), self.random.randrange(3)
        chosen = self.fresh(3)
        self.send(chosen, outcome, fault)
        for _ in range(3):
            self.send(self.fresh(4), outcome)
        self.send([*chosen[:1], *self.on_disk()], outcome)

    def file_system_full(self, outcome: Outcome) -> None:
        """The folder lies on a file system that is smaller than the cap, and partly full; later there is room."""
        self.end_life()
        folder = self.folder / "full"
        folder.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL_DISK_BYTES}", "kvferry-faults", str(folder)]
        if subprocess.run(mount, capture_output=True).returncode:  # this process may mount nothing
            self.files_limited(outcome)
            return
        try:
            self._on_full_file_system(folder, outcome)
        finally:
            self.end_life()
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)
        self.restart(outcome)

    def _on_full_file_system(self, folder: Path, outcome: Outcome) -> None:
        filler = folder / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.random.randrange(FULL_DISK_BYTES // 2, FULL_DISK_BYTES))
        self.live(disk_path=str(folder / "disk"))
        outcome.lives += 1
        chosen = self.fresh(4)
        for _ in range(2):
            self.send(chosen, outcome)
            self.send(self.fresh(3), outcome)
        outcome.met += outcome.failed_blocks["tier-full"]
        filler.unlink()
        time.sleep(DEADLINES["retry_seconds"])
        for known in (self.fresh(3), chosen):
            self.send(known, outcome)
        self.send(self.on_disk(), outcome)
        outcome.over_cap += bytes_on_disk(folder / "disk") > DISK_BYTES

    def restart(self, outcome: Outcome) -> int:
        """Kill the engine, if it lives, and let it live again; return how many blocks it found on disk."""
        self.end_life()
        started = self.live().hello["started"]
        outcome.lives += 1
        outcome.met += started["refused"]
        if started["state"] != "ready":
            outcome.kept.append(f"the engine runs without offload: {started['state']}")
        return int(started["blocks"])

    # The pool.

    def pool_fails(self, how: str, outcome: Outcome) -> None:
        """The pool's master is killed or stopped, before a request or during it; later it is there again."""
        assert self.master is not None
        away = self.master.kill if how == "killed" else self.master.stop
        chosen = [*self.random.sample(self.known, min(2, len(self.known))), *self.fresh(1)]
        if self.random.random() < 0.5:
            self.send(chosen, outcome, meanwhile=lambda _: away())
        else:
            away()
            self.send(chosen, outcome)
        self.send([*self.random.sample(self.known, 2), *self.fresh(1)], outcome)
        self.master.start() if how == "killed" else self.master.send(signal.SIGCONT)
        outcome.met += 1
        assert self.live().call("settle", with_pool=True), "the pool does not come back"
        self.send([*self.random.sample(self.known, 2), *self.fresh(1)], outcome)

    def _begin_with_pool(self) -> None:
        """Let the engine live with the pool behind its host memory, and the disk behind that."""
        if self._has_pool:
            return
        self.master = self.master or Master(self.folder)
        self.live(pool_master=self.master.address, pool_bytes=POOL_BYTES)
        self._has_pool = True
        assert self.live().call("settle", with_pool=True), "the pool's master does not answer"

"""What was measured about kernels and layouts on this machine, kept in the user's cache directory."""

import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Iterable, Sequence
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvferry.integrations.vllm.versions import installed_version
from kvferry.layout.named_layouts import NamedLayout

logger = logging.getLogger(__name__)


class Outcome(StrEnum):
    """What became of a kernel on a layout; ``NOT_CHECKED``: it does not even run on its own per-layer layout."""

    PASSES = "passes"
    WRONG = "wrong"
    REFUSED = "refused"
    NOT_CHECKED = "not checked"


class KernelCase(msgspec.Struct, frozen=True):
    """The kernel a verdict is about: vLLM's name of the back end, the cache's element type, elements, tokens."""

    backend: str
    dtype: str
    head_size: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.backend} ({self.dtype}, head size {self.head_size}, block size {self.block_size})"


class Verdict(msgspec.Struct, frozen=True):
    """How a kernel's answers on ``layout`` compare with its answers on the per-layer layout.

    ``difference`` is the largest one found between two elements, ``found`` says where it was.

    >>> case = KernelCase("CPU_ATTN", "float32", 64, 128)
    >>> print(Verdict(case, NamedLayout.BHLNC, Outcome.WRONG, 2.5, "attention of a prompt differs by 2.5"))
    CPU_ATTN (float32, head size 64, block size 128) on BHLNC: wrong, attention of a prompt differs by 2.5
    """

    case: KernelCase
    layout: NamedLayout
    outcome: Outcome
    difference: float
    found: str = ""

    @property
    def fails(self) -> bool:
        """Whether the layout must not be used with this kernel."""
        return self.outcome in (Outcome.WRONG, Outcome.REFUSED)

    def __str__(self) -> str:
        found = f", {self.found}" if self.found else ""
        return f"{self.case} on {self.layout}: {self.outcome}{found}"


class Measurement(msgspec.Struct, frozen=True):
    """The content of a file: what was measured, and with what."""

    machine: str
    verdicts: tuple[Verdict, ...]


def machine_description() -> str:
    """Return what a verdict depends on beside its case: versions and the device that runs the kernels."""
    from vllm.platforms import current_platform

    device = _cpu_description() if current_platform.is_cpu() else current_platform.get_device_name()
    return f"kvferry {version('kvferry')}, vLLM {installed_version()}, torch {version('torch')}, {device}"


def verdicts_path(machine: str) -> Path:
    """Return the file of a machine's verdicts.

    >>> import os; os.environ["XDG_CACHE_HOME"] = "/cache"
    >>> verdicts_path("one").parent, verdicts_path("one") == verdicts_path("other")
    (PosixPath('/cache/kvferry'), False)
    """
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
    return directory / f"kernels-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def load_verdicts(machine: str) -> tuple[Verdict, ...]:
    """Return what was measured on ``machine``; nothing where there is no file or none that can be read."""
    path = verdicts_path(machine)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measurement).verdicts
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("kvferry: %s is not used: %s", path, error)
        return ()


def keep_verdicts(machine: str, verdicts: Iterable[Verdict]) -> Path:
    """Keep ``verdicts`` in place of earlier ones of the same cases and layouts. Raises :class:`OSError`."""
    kept = {(verdict.case, verdict.layout): verdict for verdict in load_verdicts(machine)}
    kept |= {(verdict.case, verdict.layout): verdict for verdict in verdicts}
    path = verdicts_path(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
        draft.write(msgspec.json.format(msgspec.json.encode(Measurement(machine, tuple(kept.values())))))
    os.replace(draft.name, path)
    return path


def find_failure(
    verdicts: Sequence[Verdict], layout: NamedLayout, dtype: str, head_size: int, block_size: int
) -> Verdict | None:
    """Return a failure on ``layout`` of any back end with that cache: which one will run is not known this early."""
    for verdict in verdicts:
        case = verdict.case
        if verdict.fails and (verdict.layout, case.dtype, case.head_size, case.block_size) == (
            layout,
            dtype,
            head_size,
            block_size,
        ):
            return verdict
    return None


def _cpu_description() -> str:
    """Name the processor by its model and, because models are often veiled, by its instruction sets."""
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features", "")
    digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
    return f"{platform.machine()} {fields.get('model name', 'processor')} {digest}"

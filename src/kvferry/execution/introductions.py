"""What source ranks know of a destination rank: its introduction, and that they have connected to it."""

import hashlib
import logging
import secrets
from collections.abc import Callable

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.own_rank import OwnRank
from kvferry.handoff.messages import (
    MAX_QUESTION_BYTES,
    Answer,
    Bounded,
    EndPoint,
    Introduce,
    Met,
    Noted,
    Refusal,
    encode,
)
from kvferry.handoff.wire.addresses import is_loopback
from kvferry.handoff.wire.client import Exchange
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))

MEET_SECONDS = 2.0
"""How long a load waits until a source has connected to this rank."""
AVOID_SECONDS = 600.0
"""How long a source that cannot write here is read instead."""
TOKEN_BYTES, SECRET_BYTES = 7, 32
MAX_SOURCES = 4096
"""Source ranks to which this rank remembers its introduction."""


class Introductions:
    """The introductions of one rank, which takes reports at ``answers_at``; ``send`` sends one to a source rank.

    The server's thread calls :meth:`note_met`, the transfer thread the other methods.
    """

    def __init__(self, rank: OwnRank, answers_at: EndPoint, send: Callable[[EndPoint, Introduce], None]) -> None:
        self.registration = 0
        """How often the rank's memory was registered anew."""
        self._rank, self._answers_at, self._send = rank, answers_at, send
        self._end_points = rank.end_points
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._answers: Bounded[EndPoint, Answer | None] = Bounded(MAX_SOURCES)
        self._met: Bounded[int, int] = Bounded(MAX_SOURCES)
        self._meets_by: Bounded[EndPoint, float] = Bounded(MAX_SOURCES)
        self._avoided_until: Bounded[EndPoint, float] = Bounded(MAX_SOURCES)

    def is_introduced(self, where: EndPoint, sources: tuple[bytes, ...], version: int) -> bool:
        """Return whether a source rank knows this rank; introduce this rank if not. Raises its :class:`HandoffError`.

        ``sources`` are the encoded shards of all ranks of its engine, which speaks ``version``.
        """
        if where not in self._answers:
            introduction = self._introduction(where, sources, version)
            self._answers[where] = None
            self._send(where, introduction)
        answer = self._answers[where]
        if isinstance(answer, Refusal):
            del self._answers[where]
            raise answer.error()
        return isinstance(answer, Noted)

    def token(self, where: EndPoint) -> int:
        """Return the number by which a source rank, and no other one, knows this rank's introduction."""
        of_source = hashlib.blake2b(msgspec.msgpack.encode(where), digest_size=TOKEN_BYTES, key=self._secret)
        return int.from_bytes(of_source.digest()) or 1

    def meets(self, where: EndPoint, sources: tuple[bytes, ...], version: int, now: float) -> bool | None:
        """Return whether a source rank that was introduced has connected to this one and said so; None where it may
        still do, within :data:`MEET_SECONDS`. A source that has not is asked again after :data:`AVOID_SECONDS`, or once
        it says so after all.

        ``sources`` and ``version`` are as for :meth:`is_introduced`.
        """
        if now < self._avoided_until.get(where, 0.0) and self._met.get(where.epoch) != self.registration:
            return False
        try:
            if is_loopback(self._answers_at.host) and not is_loopback(where.host):
                raise _at_loopback(self._answers_at.host)
            if self.is_introduced(where, sources, version) and self._met.get(where.epoch) == self.registration:
                for known in (self._meets_by, self._avoided_until):
                    known.pop(where, None)
                return True
            if now < self._meets_by.setdefault(where, now + MEET_SECONDS):
                return None
            raise _out_of_reach()
        except KVFerryError as error:
            self.avoid(where, error, now)
            return False

    def avoid(self, where: EndPoint, error: KVFerryError, now: float) -> None:
        """Let nothing be written from there for :data:`AVOID_SECONDS`; then introduce this rank anew."""
        told = "kvferry: the rank at %s:%d is read for %.0f s, since it cannot write here: %s"
        logger.warning(told, where.host, where.port, AVOID_SECONDS, error, peer=f"{where.host}:{where.port}")
        self._avoided_until[where] = now + AVOID_SECONDS
        for known in (self._answers, self._meets_by):
            known.pop(where, None)
        self._met.pop(where.epoch, None)

    def forget(self, where: EndPoint) -> None:
        """The source has forgotten this rank: introduce this rank anew."""
        self._answers.pop(where, None)

    def renew(self, end_points: dict[str, bytes]) -> None:
        """The rank's memory was registered anew: introduce this rank to everybody again."""
        self.registration += 1
        self._end_points = end_points
        self._answers.clear()
        self._meets_by.clear()

    def note_met(self, question: Met) -> None:
        """A source has connected to this rank, or had before a fence, which counts no more."""
        if question.registration == self.registration:
            self._met[question.epoch] = question.registration

    def note_answer(self, exchange: Exchange, question: Introduce) -> None:
        """Take a source's answer to an introduction, None where it came too late."""
        where = EndPoint(exchange.host, exchange.port, question.epoch)
        answer = exchange.answer
        if not isinstance(answer, Noted | Refusal):
            answer = Refusal.of(unreachable(where))
        if where in self._answers and question.registration == self.registration:
            self._answers[where] = answer

    def _introduction(self, where: EndPoint, sources: tuple[bytes, ...], version: int) -> Introduce:
        introduction = Introduce(
            version=version,
            epoch=where.epoch,
            receiver=self._rank.name,
            identity=self._rank.identity,
            sources=sources,
            shard=self._rank.shard,
            end_points=self._end_points,
            answers_at=self._answers_at,
            registration=self.registration,
            token=self.token(where),
        )
        if (num_bytes := len(encode(introduction))) > MAX_QUESTION_BYTES:
            raise HandoffError(
                Reason.UNSUPPORTED,
                f"the introduction, with the shards of {len(sources)} source ranks, takes {num_bytes} bytes; "
                f"a question has at most {MAX_QUESTION_BYTES}.",
                'Set "mode" to "pull", or run the prefill engine with fewer ranks.',
            )
        return introduction


def unreachable(where: EndPoint) -> HandoffError:
    """Return the error of a source rank that does not answer."""
    return HandoffError(
        Reason.PEER_UNREACHABLE,
        f"the prefill rank at {where.host}:{where.port} does not answer.",
        "Check that the prefill engine runs, and that its host can be reached from here.",
    )


def _at_loopback(host: str) -> HandoffError:
    return HandoffError(
        Reason.PEER_UNREACHABLE,
        f"this rank answers at {host}, where no other host reaches it.",
        'Reads are slow between these hosts. Set "host" (and "advertised_host") of this engine to an address that the '
        'prefill engine reaches, or set "held_prompts" to "read".',
    )


def _out_of_reach() -> HandoffError:
    return HandoffError(
        Reason.PEER_UNREACHABLE,
        f"it has not connected to this rank within {MEET_SECONDS:.0f} s.",
        "Reads are slow between these hosts, and writes need a way from the prefill engine's host to this one: let a "
        'firewall pass "rank_ports" and the transport\'s ports, or set "held_prompts" to "read".',
    )

"""What source ranks know of a destination rank: its introduction."""

import hashlib
import secrets
from collections.abc import Callable

import msgspec

from kvferry.errors import HandoffError, Reason
from kvferry.execution.own_rank import OwnRank
from kvferry.handoff.messages import (
    MAX_QUESTION_BYTES,
    Answer,
    Bounded,
    EndPoint,
    Introduce,
    Noted,
    Refusal,
    encode,
)
from kvferry.handoff.wire.client import Exchange
from kvferry.handoff.wire.trust import is_loopback
from kvferry.transport.end_points import ProcessIdentity
from kvferry.transport.processes import is_on_this_host

TOKEN_BYTES, SECRET_BYTES = 7, 32
MAX_SOURCES = 4096
"""Source ranks to which this rank remembers its introduction."""


class Introductions:
    """The introductions of one rank, which takes reports at ``answers_at``; ``send`` sends one to a source rank."""

    def __init__(self, rank: OwnRank, answers_at: EndPoint, send: Callable[[EndPoint, Introduce], None]) -> None:
        self.registration = 0
        """How often the rank's memory was registered anew."""
        self._rank, self._answers_at, self._send = rank, answers_at, send
        self._end_points = rank.end_points
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._answers: Bounded[EndPoint, Answer | None] = Bounded(MAX_SOURCES)

    def is_introduced(
        self, where: EndPoint, sources: tuple[bytes, ...], version: int, process: ProcessIdentity | None = None
    ) -> bool:
        """Return whether a source rank knows this rank; introduce this rank if not. Raises its :class:`HandoffError`.

        ``sources`` are the encoded shards of all ranks of its engine, which speaks ``version``. A ``process`` of
        another host could not report to a rank at loopback: :class:`HandoffError` (peer-unreachable).
        """
        if is_loopback(self._answers_at.host) and process is not None and not is_on_this_host(process):
            raise _at_loopback(self._answers_at.host, where)
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

    def forget(self, where: EndPoint) -> None:
        """The source has forgotten this rank: introduce this rank anew."""
        self._answers.pop(where, None)

    def renew(self, end_points: dict[str, bytes]) -> None:
        """The rank's memory was registered anew: introduce this rank to everybody again."""
        self.registration += 1
        self._end_points = end_points
        self._answers.clear()

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
                "Run the prefill engine with fewer ranks.",
            )
        return introduction


def unreachable(where: EndPoint) -> HandoffError:
    """Return the error of a source rank that does not answer."""
    return HandoffError(
        Reason.PEER_UNREACHABLE,
        f"the prefill rank at {where.host}:{where.port} does not answer.",
        "Check that the prefill engine runs, and that its host can be reached from here.",
    )


def _at_loopback(host: str, where: EndPoint) -> HandoffError:
    return HandoffError(
        Reason.PEER_UNREACHABLE,
        f"this rank answers at {host}, where no other host reaches it, and the prefill rank at "
        f"{where.host}:{where.port} is on another host.",
        'Set "host" (and "advertised_host") of this engine to an address that the prefill engine reaches.',
    )

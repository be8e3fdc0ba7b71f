"""The prefill engine's control end point: a thread that answers questions and survives any of them."""

import logging
import threading
import time
from collections.abc import Callable

import zmq

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff import protocol
from kvferry.handoff.addresses import end_point, is_ipv6
from kvferry.handoff.protocol import MAX_TEXT_LENGTH, Answer, Question, Refusal

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 200
MAX_WAITING_QUESTIONS = 8
"""Of one connection; more wait on the peer's side. Not bounded are connections and the frames of an unfinished message,
which zmq keeps until the last has come."""


class Listener:
    """Answers each question with ``answer(question)``, on a thread of its own.

    ``upkeep`` is called on that thread several times a second, so that leases live on while an
    engine's step takes long; ``enter_thread`` is called first.

    ``port`` 0 takes a free one; :attr:`port` tells which. Raises :class:`HandoffError`
    (port-in-use) when the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[Question], Answer],
        upkeep: Callable[[], None] = lambda: None,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self._answer = answer
        self._upkeep = upkeep
        self._enter_thread = enter_thread
        self._stop = threading.Event()
        self._next_upkeep = 0.0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_QUESTION_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_WAITING_QUESTIONS)
        self._socket.setsockopt(zmq.IPV6, is_ipv6(host))
        self._socket.setsockopt(zmq.SNDTIMEO, 1000)
        self.port = self._bind(port)
        self._thread = threading.Thread(target=self._run, name="kvferry-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and give the port back, within milliseconds; twice is fine."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _bind(self, port: int) -> int:
        try:
            self._socket.bind(end_point(self.host, port or "*"))
        except zmq.ZMQError as error:
            self._socket.close()
            raise HandoffError(
                Reason.PORT_IN_USE if error.errno == zmq.EADDRINUSE else Reason.INVALID_SETTING,
                f"cannot listen on {self.host}:{port}: {error.strerror}.",
                'Set another "host" or "port" in kv_connector_extra_config; port 0 takes a free one.',
            ) from error
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def _run(self) -> None:
        with self._socket:
            self._enter()
            while not self._stop.is_set():
                try:
                    if self._socket.poll(POLL_MILLISECONDS):
                        self._serve_one()
                    self._keep_up()
                except zmq.ZMQError as error:
                    if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                        return
                    logger.warning("kvferry listener: %s", error)
                except Exception:
                    logger.exception("kvferry listener could not answer a message")

    def _enter(self) -> None:
        try:
            self._enter_thread()
        except Exception:
            logger.exception("kvferry listener: its thread could not be set up")

    def _keep_up(self) -> None:
        now = time.monotonic()
        if now >= self._next_upkeep:
            self._next_upkeep = now + POLL_MILLISECONDS / 1000
            try:
                self._upkeep()
            except Exception:
                logger.exception("kvferry listener: upkeep failed")

    def _serve_one(self) -> None:
        frames = self._socket.recv_multipart()
        if len(frames) != 3:
            logger.warning("kvferry listener: ignored a message of %d frames, expected 3", len(frames))
            return
        sender, sequence, data = frames
        self._socket.send_multipart([sender, sequence, self._answer_or_refuse(data)])

    def _answer_or_refuse(self, data: bytes) -> bytes:
        try:
            return protocol.encode(self._answer(protocol.decode_question(data)))
        except KVFerryError as error:
            logger.warning("kvferry listener refused a message: %s", error)
            refusal = Refusal(error.reason.value, error.message[:MAX_TEXT_LENGTH], error.remedy[:MAX_TEXT_LENGTH])
        except Exception:
            logger.exception("kvferry listener failed on a message")
            refusal = Refusal(Reason.UNSUPPORTED.value, "the holder failed on this message.", "Its log says why.")
        return protocol.encode(refusal)

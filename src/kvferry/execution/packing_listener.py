"""The thread on which a rank packs: its control end point answers each request for a part once the part is packed."""

import time
from collections.abc import Callable

from kvferry.execution.packing_side import PackingSide
from kvferry.handoff.messages import Packer
from kvferry.handoff.wire.server import Listener


class PackingListener:
    """Answers readers on a free port of ``host``; ``enter_thread`` is called first on the thread that packs.

    ``advertised_host`` is what readers are told in place of ``host``, where that is no address to connect to. Raises
    :class:`HandoffError` (``invalid-setting``) for a host that is not this machine's.
    """

    def __init__(
        self,
        host: str,
        side: PackingSide,
        enter_thread: Callable[[], None] = lambda: None,
        advertised_host: str = "",
    ) -> None:
        self._listener = Listener(
            host,
            port=0,
            answer=lambda question: side.answer(question, time.monotonic()),
            upkeep=lambda: side.expire(time.monotonic()),
            enter_thread=enter_thread,
        )
        self.packer = Packer(advertised_host or host, self._listener.port, side.stage_bytes)
        """What readers must know."""

    def close(self) -> None:
        """Stop packing; twice is fine."""
        self._listener.close()

"""A reset of the engine's cache, on its way from the scheduler's role to the workers' roles.

Orders reach the workers with the next step. A reset must not wait for it: the scheduler's role lets vLLM call
:func:`end_former_epoch` in every worker, between two steps.
"""

from typing import Protocol
from weakref import WeakSet


class WorkerRole(Protocol):
    """What a reset needs of a worker's role."""

    def end_former_epoch(self, epoch: int, weights_version: str) -> None:
        """End all that was held or announced before; the engine is in this epoch now, with weights of this version."""


ROLES: WeakSet[WorkerRole] = WeakSet()
"""The roles of this process: vLLM passes the call to a worker, which does not know the roles of its connectors."""


def end_former_epoch(worker: object, epoch: int, weights_version: str) -> None:
    """Do as :meth:`WorkerRole.end_former_epoch` in every role of the worker's process."""
    for role in list(ROLES):
        role.end_former_epoch(epoch, weights_version)

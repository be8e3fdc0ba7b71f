"""A reset of the engine's cache, on its way from the scheduler's role to the workers' roles.

Orders reach the workers with the next step. A reset must not wait for it: the scheduler's role lets vLLM call
:func:`end_former_epoch` in every worker, between two steps.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from kvferry.integrations.vllm.worker.role import WorkerRole

ROLES: "WeakSet[WorkerRole]" = WeakSet()
"""The roles of this process: vLLM passes the call to a worker, which does not know the roles of its connectors."""


def end_former_epoch(worker: object, names: Sequence[str], weights_version: str) -> None:
    """Do as :meth:`WorkerRole.end_former_epoch` in every role of the worker's process."""
    for role in list(ROLES):
        role.end_former_epoch(names, weights_version)

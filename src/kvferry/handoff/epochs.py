"""Epochs: one life of a process. What was said to a former one holds for nobody."""

from kvferry.errors import HandoffError, Reason


def check_epoch(epoch: int, own: int, who: str = "engine") -> None:
    """Raise :class:`HandoffError` (peer-changed) for a message to another life of this prefill engine or rank.

    >>> check_epoch(7, own=7)
    >>> check_epoch(6, own=7, who="rank")
    Traceback (most recent call last):
    kvferry.errors.HandoffError: the message is for epoch 6 of this rank, which now is in epoch 7. ...
    """
    if epoch != own:
        raise HandoffError(
            Reason.PEER_CHANGED,
            f"the message is for epoch {epoch} of this {who}, which now is in epoch {own}.",
            "The prefill engine was restarted: send the prompt again.",
        )

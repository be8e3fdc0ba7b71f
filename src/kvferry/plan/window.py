"""Which tokens of a sliding window are worth moving."""


def first_token_to_move(
    *,
    num_computed_tokens: int,
    first_token: int,
    window: int,
    source_block_size: int,
    destination_block_size: int,
    whole_pages: bool,
) -> int:
    """Return the first token to move of a group of which only a window is kept.

    Trim to the prompt first, then clip the window: ``num_computed_tokens`` are the prompt's tokens that the receiver
    counts as computed when it goes on, never the tokens that its block list has room for. Look-ahead blocks of
    speculative decoding lie behind them; counting these would move the window past tokens that are still needed.
    ``first_token`` is the first that the receiver lacks. Block sizes are in global tokens: a block's, times the
    context-parallel size.

    The next token attends to itself and to ``window - 1`` before it, so nothing earlier is needed. The result is
    rounded down to where both sides' blocks begin to be real: an engine gives back only blocks that lie before the
    window as a whole. That keeps whole blocks whole at no cost, and never reaches a null block, of which there may be
    any number in the lists before. It goes below ``first_token`` only for ``whole_pages``, which move as a whole.

    >>> clip = dict(first_token=0, window=100, source_block_size=16, destination_block_size=16, whole_pages=False)
    >>> first_token_to_move(num_computed_tokens=1000, **clip)
    896
    >>> first_token_to_move(num_computed_tokens=50, **clip)
    0
    >>> first_token_to_move(num_computed_tokens=1000, **{**clip, "destination_block_size": 64})
    896
    >>> first_token_to_move(num_computed_tokens=1000, **{**clip, "first_token": 950, "whole_pages": True})
    944
    """
    needed = max(first_token, num_computed_tokens - window + 1)
    if needed >= num_computed_tokens:
        return num_computed_tokens
    real = max(needed // size * size for size in (source_block_size, destination_block_size))
    return real if whole_pages else max(real, first_token)

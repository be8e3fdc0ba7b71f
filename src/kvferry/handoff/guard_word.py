"""What a guard word says: 16 bytes that name one hold, its prompt and its blocks.

A prefill engine computes the word of a hold from its own request. A decode engine computes the word that it expects
from its *own* prompt and from the blocks, the slot and the hold that a request's parameters name. The two words are
equal only if the parameters name the blocks of this very prompt, in the right order, and the hold's generation, which
nobody can guess. See docs/decisions/guard-words.md.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.arrays import Integers
from kvferry.handoff.messages import Handle

WORD_BYTES = 16
CLEARED = bytes(WORD_BYTES)
"""The word of a slot without a hold. Each half of a hold's word is odd, so that a hold's word is never like it."""
_HALF = WORD_BYTES // 2
_ODD_HALVES = 1 | 1 << 8 * _HALF
_BEING_WRITTEN = 1 << 8 * WORD_BYTES - 1
"""Never set in a hold's word, but in the word of a hold whose blocks a step writes: the decode rank reads it again."""


class HeldPrompt(NamedTuple):
    """What is held: the prompt's digest and number of tokens, and the block size and block ids of each cache group."""

    prompt_digest: str
    num_tokens: int
    block_sizes: Sequence[int]
    block_ids: Sequence[Integers]


def guard_word(engine_id: str, epoch: int, handle: Handle, prompt: HeldPrompt) -> bytes:
    """Return the guard word of a hold: a decode rank must find this word before and after the data.

    >>> prompt = HeldPrompt("digest", 32, [16], [np.array([2, 1])])
    >>> word = guard_word("engine", 7, Handle("a", 3), prompt)
    >>> len(word), word == guard_word("engine", 7, Handle("a", 3), prompt._replace(block_ids=[np.array([1, 2])]))
    (16, False)
    """
    named = (
        engine_id,
        epoch,
        handle.request_id,
        handle.generation,
        prompt.prompt_digest,
        prompt.num_tokens,
        list(prompt.block_sizes),
        [np.asarray(ids, dtype="<i8").tobytes() for ids in prompt.block_ids],
    )
    # msgpack marks where each part ends.
    digest = hashlib.blake2b(msgspec.msgpack.encode(named), digest_size=WORD_BYTES, person=b"kvferry guard").digest()
    word = (int.from_bytes(digest, "little") | _ODD_HALVES) & ~_BEING_WRITTEN
    return word.to_bytes(WORD_BYTES, "little")


def being_written(word: bytes) -> bytes:
    """Return the guard word of the same hold while its blocks are being written."""
    return (int.from_bytes(word, "little") | _BEING_WRITTEN).to_bytes(WORD_BYTES, "little")


def is_cleared(word: bytes) -> bool:
    """Return whether a word is cleared, or was read while one half of it was.

    >>> is_cleared(CLEARED), is_cleared(bytes(8) + b"half set"), is_cleared(b"both halves set.")
    (True, True, False)
    """
    return CLEARED[:_HALF] in (word[:_HALF], word[_HALF:])

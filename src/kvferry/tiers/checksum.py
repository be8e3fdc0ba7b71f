"""The checksum of a block, which every lower tier keeps and compares; apart, as only lower tiers need xxhash."""

import ctypes

from kvferry.errors import Reason, TierError, install_command

try:
    from xxhash import xxh3_64_intdigest
except ImportError as error:
    remedy = f"Install it: {install_command('xxhash')}"
    raise TierError(Reason.MISSING_DEPENDENCY, "xxhash is not installed.", remedy) from error


def checksum(address: int, length: int) -> int:
    """Return the XXH3 64-bit hash, seed 0, of ``length`` bytes of this process's memory. Releases the GIL.

    >>> import numpy as np
    >>> block = np.arange(100, dtype=np.uint8)
    >>> first = checksum(block.ctypes.data, 100)
    >>> block[7] ^= 1
    >>> first != checksum(block.ctypes.data, 100), checksum(block.ctypes.data, 0) == 0x2D06800538D394C2
    (True, True)
    """
    return xxh3_64_intdigest((ctypes.c_char * length).from_address(address))

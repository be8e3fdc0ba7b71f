"""When the receiver may believe the bytes: messages, leases and the two sides of a pull, as pure state machines.

Only :mod:`listener` and :mod:`client` touch sockets and threads; everything else takes messages and time as inputs.
"""

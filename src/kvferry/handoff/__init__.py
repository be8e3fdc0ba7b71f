"""When a destination may believe the bytes: messages, holds, writes and loads as pure state machines.

Only :mod:`wire` touches sockets and threads; every other module takes messages and time as inputs.
"""

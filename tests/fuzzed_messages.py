"""Messages as a hostile peer may send them: well-formed with random fields, ill-formed, and random bytes.

``KVFERRY_FUZZ_SECONDS`` says how long all fuzz tests together take (10), ``KVFERRY_FUZZ_CASES`` how many
cases they have at least, and ``KVFERRY_FUZZ_SEED`` which. For one long run::

    KVFERRY_FUZZ_CASES=10000000 KVFERRY_FUZZ_SEED=1 python -m pytest -s tests/local/test_fuzzed_input.py
"""

import gc
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import inspect

SECONDS = float(os.environ.get("KVFERRY_FUZZ_SECONDS", "10"))
CASES = int(os.environ.get("KVFERRY_FUZZ_CASES", "0"))
SEED = int(os.environ.get("KVFERRY_FUZZ_SEED", "0"))
MAX_GROWTH = 64 << 20
"""Bytes that the process may grow by in one test, beyond what its first cases need."""
WARM_UP_CASES = 500
USES = 10
"""Encodings that are made of one message: to draw a message takes longer than to damage it."""
LARGE = (1 << 31, (1 << 53) + 1, (1 << 63) - 1)
TEXTS = ("a", "a\nERROR forged\x1b[2J", "\x00", "\u202e", "ü" * 40, "x" * 512, "../../etc", "127.0.0.1", "::1", "%s%n")
HOSTS = ("a", "127.0.0.1", "::1", "[::1]", "x" * 63)
HOST_FIELDS = {"host", "remote_host"}
MARKS = (b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 300, b"\xdb", b"\xff\xfe")
"""Bytes that msgpack never uses, a list of 4 billion elements, a deep list, a long text, and no UTF-8."""
ANYTHING: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 255, *LARGE, (1 << 64) - 1, -(1 << 63), 0.0, -1.5, 1e308, float("inf"), float("nan")),
    *("", *TEXTS, "y" * 5000, b"", b"\xff" * 100, [], {}, [[]], [[[[[[]]]]]], {"type": "renew"}, {1: 2}, [None] * 100),
)


class Fuzzer:
    """Random messages from a seed. ``known`` are values that the addressed program knows: with them a message gets far.

    >>> from kvferry.handoff.messages import Question, decode_question
    >>> fuzzer = Fuzzer(0)
    >>> all(fuzzer.valid(Question) == decode_question(fuzzer.last) for _ in range(50))
    True
    """

    def __init__(self, seed: int, known: Sequence[Any] = ()) -> None:
        self.random = random.Random(seed)
        self._known = list(known)
        self._kinds: dict[Any, inspect.Type] = {}
        self._drawn: dict[Any, tuple[Any, bytes, int]] = {}
        self.last = b""

    def valid(self, kind: Any) -> Any:
        """Return a message of this kind whose fields are random within their bounds; ``last`` is its encoding."""
        info = self._kinds.get(kind)
        if info is None:
            info = self._kinds[kind] = inspect.type_info(kind)
        message = self._value(info)
        self.last = msgspec.msgpack.encode(message)
        return message

    def ill_formed(self, message: Any) -> Any:
        """Return a message as plain data, with one to three values in it replaced, removed or added."""
        data = msgspec.to_builtins(message, builtin_types=(bytes,))
        for _ in range(self.random.randint(1, 3)):
            data = self._changed(data)
        return data

    def damaged(self, data: bytes) -> bytes:
        """Return bytes with some flipped, cut, repeated or inserted."""
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 1, 2, 5, 20))):
            place = self.random.randrange(len(changed) + 1)
            match self.random.randrange(5):
                case 0 if changed:
                    changed[place % len(changed)] ^= 1 << self.random.randrange(8)
                case 1:
                    changed[place:place] = self.random.randbytes(self.random.randint(1, 8))
                case 2:
                    del changed[place : place + self.random.randint(1, 16)]
                case 3:
                    changed[place:place] = changed[max(0, place - 32) : place]
                case _:
                    changed[place : place + 1] = self.random.choice(MARKS)
        return bytes(changed)

    def encoded(self, kind: Any) -> bytes:
        """Return the encoding of a message: whole, ill-formed, damaged, or of random bytes alone."""
        message, data, num_uses = self._drawn.get(kind, (None, b"", 0))
        if num_uses == 0:
            message = self.valid(kind)
            data, num_uses = self.last, USES
        self._drawn[kind] = message, data, num_uses - 1
        draw = self.random.random()
        if draw < 0.4:
            data = msgspec.msgpack.encode(self.ill_formed(message))
        elif draw < 0.8:
            data = self.damaged(data)
        elif draw < 0.85:
            data = self.random.randbytes(self.random.randrange(300))
        self.last = data
        return data

    def _value(self, info: inspect.Type) -> Any:
        draw = self.random
        match info:
            case inspect.UnionType():
                return self._value(draw.choice(info.types))
            case inspect.StructType():
                drawn = {field.name: self._value(field.type) for field in info.fields}
                # A type does not say what is a host: the message checks it.
                return info.cls(**drawn | {name: draw.choice(HOSTS) for name in drawn.keys() & HOST_FIELDS})
            case inspect.IntType():
                least, most = info.ge or 0, info.le if info.le is not None else (info.lt or 1 << 63) - 1
                known = [each for each in self._known if type(each) is int and least <= each <= most]
                if known and draw.random() < 0.6:
                    return draw.choice(known)
                return min(max(draw.choice((least, least + 1, draw.randrange(300), *LARGE, most)), least), most)
            case inspect.FloatType():
                return self._float(info)
            case inspect.StrType():
                known = [each for each in self._known if isinstance(each, str)]
                text = draw.choice(known) if known and draw.random() < 0.6 else draw.choice(TEXTS)
                return text[: info.max_length]
            case inspect.BytesType():
                known = [each for each in self._known if isinstance(each, bytes)]
                data = draw.choice(known) if known and draw.random() < 0.6 else draw.randbytes(draw.randrange(80))
                if known and draw.random() < 0.3:
                    data = self.damaged(data)
                return data[: info.max_length]
            case inspect.VarTupleType() | inspect.ListType():
                number = max(info.min_length or 0, min(draw.choice((0, 1, 1, 2, 5, 40)), info.max_length or 40))
                found = [self._value(info.item_type) for _ in range(number)]
                return tuple(found) if isinstance(info, inspect.VarTupleType) else found
            case inspect.TupleType():
                return tuple(self._value(each) for each in info.item_types)
            case inspect.DictType():
                return {
                    self._value(info.key_type): self._value(info.value_type) for _ in range(draw.choice((0, 1, 1, 3)))
                }
            case inspect.BoolType():
                return draw.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.LiteralType():
                return draw.choice(info.values)
            case _:
                raise NotImplementedError(f"no random value of {info}")

    def _float(self, info: inspect.FloatType) -> float:
        found = self.random.choice((1e-9, 0.5, 1.0, 60.0, 1e6, info.le or 1e300))
        return min(found, info.le) if info.le is not None else found

    def _changed(self, data: Any) -> Any:
        draw = self.random
        if isinstance(data, dict) and data and draw.random() < 0.85:
            key = draw.choice(list(data))
            rest = {other: value for other, value in data.items() if other != key}
            match draw.randrange(6):
                case 0:
                    return rest
                case 1:
                    return {**data, "unknown": draw.choice(ANYTHING)}
                case _:
                    return {**rest, key: self._changed(data[key])}
        if isinstance(data, list | tuple) and data and draw.random() < 0.7:
            place = draw.randrange(len(data))
            return [*data[:place], self._changed(data[place]), *data[place + 1 :], *draw.choice(((), data))]
        return draw.choice(ANYTHING)


def resident_bytes() -> int:
    """Return the memory that the process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(
    case: Callable[[Fuzzer], object],
    share: float,
    known: Sequence[Any] = (),
    allowed: type[Exception] | tuple[type[Exception], ...] = (),
) -> int:
    """Run cases for a share of the time and of the number of cases; return how many they were.

    A case may raise what is ``allowed``. Raises :class:`AssertionError` naming the case for any other error, and where
    the process grows by more than :data:`MAX_GROWTH`.
    """
    fuzzer = Fuzzer(SEED, known)
    end, number, limit = time.monotonic() + SECONDS * share, 0, 0
    while time.monotonic() < end or number < CASES * share:
        try:
            case(fuzzer)
        except allowed:
            pass
        except Exception as error:
            raise AssertionError(f"case {number} of seed {SEED}, {fuzzer.last!r}") from error
        number += 1
        if number % WARM_UP_CASES == 0:
            if number % (100 * WARM_UP_CASES) == 0:
                gc.collect()
            limit = limit or resident_bytes() + MAX_GROWTH
            assert resident_bytes() < limit, f"the process grows: {resident_bytes()} bytes after {number} cases"
    return number

"""Mutations: of JSON by its structure, of lines by their order, of anything by its bytes. Pure, with the given rng."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from tether_collector.keeper import records
from tether_fuzz.target import Shape

VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 7, 63, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**40, 1.5, 1e308, -0.0),
    *("", "_", "a", "a.b", "../../etc", "/", "\x00", "\ud800", "é☃𝄞", "x" * 65, "x" * 300, "*", ">", "skip-1", "0"),
    *([], {}, [None], [[]], [{}], {"": None}, {"a": {"a": []}}, [0, "", None]),
)
TOKENS: Final = (
    b"",
    b"\x00",
    b"\xff\xfe",
    b"NaN",
    b"1e999",
    b"\\ud800",
    b'"',
    b"\\",
    b"[" * 200,
    b"{}",
    b"\r\n",
    b"\xf5TR\x01",
)
_KEYS_MAX: Final = 64


class Mutator:
    """`pool`: inputs whose parts may be spliced in."""

    def __init__(self, rng: random.Random, shape: Shape, bytes_max: int, pool: Sequence[bytes]) -> None:
        self._rng = rng
        self._bytes_max = bytes_max
        self._pool = pool
        by_shape: dict[Shape, Callable[[bytes], bytes]] = {
            "json": self._json,
            "lines": self._lines,
            "bytes": self._bytes,
            "text": self._text,
            "spool": self._spool,
        }
        self._mutate = by_shape[shape]

    def __call__(self, data: bytes) -> bytes:
        for _ in range(self._rng.choice((1, 1, 1, 2, 3, 6))):
            data = self._mutate(data)
        return data[: self._bytes_max]

    def _other(self) -> bytes:
        return self._rng.choice(self._pool) if self._pool else b""

    # --- bytes ---

    def _bytes(self, data: bytes) -> bytes:
        rng = self._rng
        at = rng.randint(0, len(data))
        end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 64)))
        match rng.randrange(7):
            case 0:
                return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1:
                return data[:at] + data[end:]
            case 2:
                return data[:end] + data[at:end] * rng.choice((1, 1, 3, 40)) + data[end:]
            case 3:
                return data[:at] + rng.choice(TOKENS) + data[at:]
            case 4:
                other = self._other()
                cut = rng.randint(0, len(other))
                return data[:at] + other[cut : cut + rng.choice((4, 32, 4096))] + data[end:]
            case 5:
                number = struct.pack(rng.choice(("<I", ">I", "<Q", ">Q")), rng.choice((0, 1, 2**31, 2**32 - 1)))
                return data[:at] + number + data[at + len(number) :]
            case _:
                return data[:at]

    def _text(self, data: bytes) -> bytes:
        alphabet = b"ABab01-_=.%+/ "
        if self._rng.random() < 0.5:
            at = self._rng.randint(0, len(data))
            return data[:at] + bytes([self._rng.choice(alphabet)]) + data[at + self._rng.randrange(2) :]
        return self._bytes(data)

    # --- JSON ---

    def _json(self, data: bytes) -> bytes:
        if self._rng.random() < 0.08:
            return self._bytes(data)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return self._bytes(data)
        return json.dumps(self._changed(value), separators=(",", ":")).encode()

    def _changed(self, value: Any) -> Any:
        """With one place of it replaced, removed, doubled, renamed or wrapped."""
        rng = self._rng
        if not isinstance(value, dict | list) or not value or rng.random() < 0.03:
            return self._value(value)
        keys: Sequence[Any] = list(value)[:_KEYS_MAX] if isinstance(value, dict) else range(min(len(value), _KEYS_MAX))
        key = rng.choice(keys)
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
            value[key] = self._changed(inner)
        elif isinstance(value, dict):
            match rng.randrange(8):
                case 0:
                    del value[key]
                case 1:
                    value[self._key()] = value.pop(key)
                case 2:
                    value[self._key()] = self._value(inner)
                case _:
                    value[key] = self._value(inner)
        else:
            match rng.randrange(6):
                case 0:
                    del value[key]
                case 1:
                    value.insert(rng.randint(0, len(value)), copy.deepcopy(inner))
                case 2:
                    value[key:] = [copy.deepcopy(inner) for _ in range(rng.choice((2, 3, 20)))]
                case 3:
                    rng.shuffle(value)
                case _:
                    value[key] = self._value(inner)
        return value

    def _key(self) -> str:
        other = self._node()
        keys = list(other) if isinstance(other, dict) else []
        return str(self._rng.choice(keys)) if keys else str(self._rng.choice(("", "v", "id", "\ud800")))

    def _node(self) -> Any:
        """Some place of another input."""
        lines = self._other().split(b"\n")
        try:
            node = json.loads(self._rng.choice(lines))
        except (ValueError, RecursionError):
            return None
        for _ in range(self._rng.randrange(5)):
            if isinstance(node, dict) and node:
                node = self._rng.choice(list(node.values()))
            elif isinstance(node, list) and node:
                node = self._rng.choice(node)
        return node

    def _value(self, old: Any) -> Any:
        rng = self._rng
        match rng.randrange(6):
            case 0 if isinstance(old, int) and not isinstance(old, bool):
                return old + rng.choice((-1, 1, 2, 100))
            case 0 if isinstance(old, str):
                return rng.choice((old + old[:1], old[1:], old.upper(), old * 3, old.replace(".", "/")))
            case 1:
                return copy.deepcopy(self._node())
            case 2:
                return [old] if rng.random() < 0.5 else {self._key(): old}
            case 3 if rng.random() < 0.1:
                deep: Any = old
                for _ in range(rng.choice((10, 63, 64, 65, 200))):
                    deep = [deep]
                return deep
            case _:
                return copy.deepcopy(rng.choice(VALUES))

    # --- lines ---

    def _lines(self, data: bytes) -> bytes:
        rng = self._rng
        lines = data.split(b"\n")
        at = rng.randrange(len(lines))
        match rng.randrange(9):
            case 0:
                del lines[at]
            case 1:
                lines.insert(rng.randint(0, len(lines)), lines[at])
            case 2:
                lines.insert(rng.randint(0, len(lines)), lines.pop(at))
            case 3:
                other = self._other().split(b"\n")
                begin = rng.randrange(len(other))
                lines[at:at] = other[begin : begin + rng.choice((1, 1, 3, 10))]
            case 4:
                lines[at:] = lines[at:] + lines[at:]
            case 5:
                lines = lines[: at + 1]
            case _:
                lines[at] = self._json(lines[at])
        return b"\n".join(lines)

    # --- spool ---

    def _spool(self, data: bytes) -> bytes:
        """Mostly whole records with a right checksum, whose contents are wrong: damage is found by the checksum."""
        if self._rng.random() < 0.25:
            return self._bytes(data)
        head = records.parse_segment_header(data)
        if head is None:
            return self._bytes(data)
        salt, first = head
        found = []
        at = records.SEGMENT_HEADER_BYTES
        while at < len(data):
            end, kind, number, at_us, meta, content = records.parse(data, at, salt)
            if end < 0:
                break
            found.append((kind, number, at_us, meta, content))
            at = end
        self._change_records(found)
        rest = data[at:] if self._rng.random() < 0.7 else b""
        encoded = [records.encode(salt, *record) for record in found]
        return b"".join((records.segment_header(salt, first), *encoded, rest))

    def _change_records(self, found: list[tuple[int, int, int, bytes, bytes]]) -> None:
        rng = self._rng
        if not found:
            found.append((records.STDOUT, 1, 0, b"", b"{}"))
        at = rng.randrange(len(found))
        kind, number, at_us, meta, content = found[at]
        match rng.randrange(8):
            case 0:
                del found[at]
            case 1:
                found.insert(rng.randint(0, len(found)), found[at])
            case 2:
                found[at] = (rng.choice(tuple(records.KIND_NAMES)), number, at_us, meta, content)
            case 3:
                found[at] = (kind, rng.choice((0, number + 1, number - 1, 2**63, 1)) % 2**64, at_us, meta, content)
            case 4:
                found[at] = (kind, number, rng.choice((0, 1, at_us + 10**6)), meta, content)
            case 5:
                found[at] = (kind, number, at_us, self._json(meta or b"{}")[:60_000], content)
            case 6:
                found[at] = (kind, number, at_us, meta, self._json(content))
            case _:
                other = [one[4] for one in found]
                found.insert(at + 1, (kind, number + 1, at_us, meta, rng.choice(other)))
                found[at + 2 :] = [(one[0], one[1] + 1, *one[2:]) for one in found[at + 2 :]]

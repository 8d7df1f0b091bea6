"""Which lines of the product an input ran: `sys.monitoring` from Python 3.12 on, `sys.settrace` before.

Monitoring switches each line off once it was seen, so it costs nothing in the long run. A trace function costs every
line of every call; so it leaves a function alone that has shown nothing new for a while, except in every sixteenth run.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final, Protocol

DULL_AFTER_CALLS: Final = 40
FULL_EVERY: Final = 16


class Coverage(Protocol):
    @property
    def seen(self) -> set[Hashable]: ...

    def run(self) -> Any:
        """A context: lines that are run in it are added to `seen`."""


class _Monitoring:
    _TOOL: Final = 4

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self.seen: set[Hashable] = set()
        self._files: dict[str, bool] = {}
        self._prefixes = _paths(prefixes)
        self._monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        self._monitoring.use_tool_id(self._TOOL, "tether_fuzz")
        event = self._monitoring.events.LINE
        self._monitoring.register_callback(self._TOOL, event, self._line)
        self._monitoring.set_events(self._TOOL, event)

    def _line(self, code: CodeType, line: int) -> Any:
        if _is_ours(code.co_filename, self._files, self._prefixes):
            self.seen.add((code, line))
        return self._monitoring.DISABLE

    @contextmanager
    def run(self) -> Iterator[None]:
        yield


class _Tracing:
    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self.seen: set[Hashable] = set()
        self._files: dict[str, bool] = {}
        self._prefixes = _paths(prefixes)
        self._dull: dict[CodeType, int] = {}
        self._runs = 0
        self._full = True

    def _call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        code = frame.f_code
        if not _is_ours(code.co_filename, self._files, self._prefixes):
            return None
        calls = self._dull.get(code, 0)
        if calls > DULL_AFTER_CALLS and not self._full:
            return None
        self._dull[code] = calls + 1
        return self._local

    def _local(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            key = (frame.f_code, frame.f_lineno)
            if key not in self.seen:
                self.seen.add(key)
                self._dull[frame.f_code] = 0
        return self._local

    @contextmanager
    def run(self) -> Iterator[None]:
        self._runs += 1
        self._full = self._runs % FULL_EVERY == 0
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)


def _paths(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("/" + prefix.replace(".", "/") for prefix in prefixes)


def _is_ours(filename: str, known: dict[str, bool], prefixes: tuple[str, ...]) -> bool:
    found = known.get(filename)
    if found is None:
        found = known[filename] = any(prefix in filename for prefix in prefixes) and "tether_fuzz" not in filename
    return found


class _Nothing:
    """Of a target whose lines say nothing."""

    def __init__(self) -> None:
        self.seen: set[Hashable] = set()

    @contextmanager
    def run(self) -> Iterator[None]:
        yield


def coverage(prefixes: tuple[str, ...]) -> Coverage:
    if not prefixes:
        return _Nothing()
    return _Monitoring(prefixes) if sys.version_info >= (3, 12) else _Tracing(prefixes)

"""Named steps at which a process can be made to die: off by default, and then an empty call.

    failpoint("collector.frame.stored")     a step of its own
    failpoint_of("router.admission", x, Effect)   a step for each class of a union: router.admission.write_owner, …
    under("collector")("claimed")            a hook `step(name)` that others replace: collector.claimed

Read once, when the process starts:

    TETHER_TEST_FAILPOINT=name[:nth][,name[:nth]…]   SIGKILL to itself when the step is passed for the nth time (1)
    TETHER_TEST_FAILPOINTS_DIR=folder                a file `folder/name` arms the step while the process runs; it is
                                                     removed before the kill, so each file kills once, whoever passes

A step is named after what has just been done, before anybody is told of it. SIGKILL, not an exception: nothing of the
process gets to clean up. Nobody but tests and `make chaos` sets these variables; every name in the code is found by a
scan of the code (`tether_chaos.failpoints`), which is how a step that nothing exercises is noticed.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from typing import Final

VARIABLE: Final = "TETHER_TEST_FAILPOINT"
FOLDER_VARIABLE: Final = "TETHER_TEST_FAILPOINTS_DIR"


def _parse(text: str) -> dict[str, int]:
    """Raises ValueError, which ends the process: a step that is never passed would be a test that cannot fail."""
    found: dict[str, int] = {}
    for entry in filter(None, text.split(",")):
        name, _, nth = entry.strip().partition(":")
        if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name) or (nth and not (nth.isdecimal() and int(nth))):
            raise ValueError(f"{VARIABLE}: {entry!r} is not name[:nth], as collector.frame.stored:2")
        found[name] = int(nth or 1)
    return found


_left: Final[dict[str, int]] = _parse(os.environ.get(VARIABLE, ""))
_folder: Final[str] = os.environ.get(FOLDER_VARIABLE, "")
ARMED: Final = bool(_left or _folder)


def failpoint(name: str) -> None:
    """The step `name` was passed."""
    if ARMED:
        _passed(name)


def failpoint_of(prefix: str, done: object, _union: object) -> None:
    """The step of `done`'s class, one of `_union` (which the scan reads)."""
    if ARMED:
        _passed(f"{prefix}.{snake(type(done).__name__)}")


def under(prefix: str) -> Callable[[str], None]:
    """A hook for a component whose steps are all of one kind; `prefix` is put before their names."""
    if not ARMED:
        return _nothing

    def step(name: str) -> None:
        _passed(f"{prefix}.{name}")

    return step


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process that starts others hands on to them."""
    return {name: environ[name] for name in (VARIABLE, FOLDER_VARIABLE) if name in environ}


def snake(name: str) -> str:
    """`WriteOwner` → `write_owner`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _nothing(_: str) -> None:
    return None


def _passed(name: str) -> None:
    if name in _left:
        _left[name] -= 1
        if _left[name] == 0:
            _die()
    if _folder:
        try:
            os.unlink(os.path.join(_folder, name))  # noqa: PTH108, PTH118 - passed on the hot path, when armed
        except FileNotFoundError:
            return
        _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

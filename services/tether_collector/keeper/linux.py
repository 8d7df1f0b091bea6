"""The few system calls that `os` does not offer on every supported Python, and the sweep over /proc.

The sweep serves where there is no PID namespace to kill. It finds what belongs to a CLI by two marks: ancestry (the
keeper is the subreaper, so every orphan of the tree comes back to it) and the launch nonce in the environment (for
what was started through somebody else's daemon). It freezes before it kills, so that a process cannot fork away
between the look and the signal, and it is repeated by the caller until a pass finds nothing.
"""

# pathlib costs more than a MiB.
# ruff: noqa: PTH208
from __future__ import annotations

# `signal` builds enums that cost half a MiB; its C part has the same functions.
import _signal  # type: ignore[import-not-found, unused-ignore]
import ctypes
import os

SIGKILL, SIGTERM, SIGCHLD, SIGSTOP, SIGPIPE = 9, 15, 17, 19, 13
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 2, 4, 8, 0x4000, 0x80000
FREEZE_ROUNDS_MAX = 8  # looks for new processes before one pass kills what it has frozen
ENVIRON_BYTES_MAX = 1024 * 1024  # read of one process's environment

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raises OSError where a call of the C library failed."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def prctl(option: int, argument: int) -> None:
    """prctl(2) with a number."""
    check(libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), "prctl")


def set_name(name: bytes) -> None:
    """The name that ps shows, at most 15 bytes."""
    check(libc.prctl(PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0), "prctl")


def unshare(flags: int) -> None:
    """unshare(2)."""
    check(libc.unshare(flags), "unshare")


def mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> None:
    """mount(2) without data."""
    check(libc.mount(source, target, kind, ctypes.c_ulong(flags), None), "mount")


def default_signals() -> None:
    """Every disposition as a fresh program expects it, nothing blocked, no wake-up descriptor."""
    _signal.set_wakeup_fd(-1)
    for number in range(1, _signal.NSIG):
        try:
            _signal.signal(number, _signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # SIGKILL, SIGSTOP and the ones the C library keeps
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def send_signal(pidfd: int, number: int) -> bool:
    """Signal a process by its descriptor; False where it is gone."""
    try:
        _signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


class _Process:
    __slots__ = ("parent", "started", "state")

    def __init__(self, state: str, parent: int, started: str) -> None:
        self.state = state
        self.parent = parent
        self.started = started


def _stat(pid: int) -> _Process | None:
    raw = _read(f"/proc/{pid}/stat", 4096)
    # The command's name stands in parentheses and may hold anything, parentheses included.
    fields = raw[raw.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return _Process(fields[0].decode(), int(fields[1]), fields[19].decode())


def _read(path: str, limit_bytes: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, limit_bytes)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _belonging(root: int, marker: bytes) -> dict[int, _Process]:
    """Living processes below `root` or with the marker in their environment; never `root` itself."""
    table: dict[int, _Process] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = _stat(int(name))
            if process is not None:
                table[int(name)] = process
    found: dict[int, _Process] = {}
    for pid, process in table.items():
        if pid == root or process.state in "ZX":
            continue
        if _descends(pid, root, table) or b"\0" + marker + b"\0" in b"\0" + _read(
            f"/proc/{pid}/environ", ENVIRON_BYTES_MAX
        ):
            found[pid] = process
    return found


def _descends(pid: int, root: int, table: dict[int, _Process]) -> bool:
    for _ in range(len(table)):
        process = table.get(pid)
        if process is None:
            return False
        pid = process.parent
        if pid == root:
            return True
    return False


def _signal_same(pid: int, process: _Process, number: int) -> None:
    """Signal the process that was looked at, never one that has its number since."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        now = _stat(pid)
        if now is not None and now.started == process.started:
            send_signal(pidfd, number)
    except PermissionError:
        pass  # another user's process: it stays in the count, and the proof is not given
    finally:
        os.close(pidfd)


def sweep(root: int, marker: bytes) -> int:
    """One pass: freeze what belongs to the tree, then kill it. The number of processes found; 0 is a clean pass."""
    frozen: dict[int, _Process] = {}
    for _ in range(FREEZE_ROUNDS_MAX):
        new = {pid: process for pid, process in _belonging(root, marker).items() if pid not in frozen}
        if not new:
            break
        for pid, process in new.items():
            _signal_same(pid, process, SIGSTOP)
        frozen.update(new)
    for pid, process in frozen.items():
        _signal_same(pid, process, SIGKILL)
    return len(frozen)

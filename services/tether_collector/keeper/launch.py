"""From the launch specification on stdin to a detached keeper.

1. The collector writes one JSON object to stdin and closes it (the environment may hold keys: it never appears in
   an argument list or on disk).
2. The keeper forks once, so that it is nobody's child and leaves no zombie to the collector.
3. `DIR/lock` is taken for the keeper's life. Who finds it free knows that no keeper lives here.
4. The socket listens; the mode of isolation is entered.
5. `DIR/spawn.json` is created, exclusively, fsynced with its folder. Where it exists nothing is ever spawned again.
6. The CLI is started. One line on stdout says how that went; then the standard descriptors are closed.

A crash between 5 and 6 leaves a spawn record without a CLI: the process generation is used up, which is the safe
side of "never twice".
"""

# pathlib costs more than a MiB.
# ruff: noqa: PTH100, PTH101, PTH103, PTH110, PTH120
from __future__ import annotations

import fcntl
import os
import sys
import time

from . import records
from .confine import Confinement, hide
from .control import SOCKET_NAME, listen
from .core import Keeper
from .jsonlite import Json, dumps, loads
from .spawn import Command, ExecError, choose_isolation, spawn
from .spool import SpoolWriter, now_us

try:
    from _sha2 import sha256  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # before 3.12
    from _sha256 import sha256  # type: ignore[import-not-found, no-redef, unused-ignore]

SPEC_BYTES_MAX = 4 * 1024 * 1024
LOCK_WAIT_S = 1.0  # somebody who looks whether the lock is free holds it for an instant
LOCK_RETRY_S = 0.01
MARKER = "TETHER_PROCESS_NONCE"
ISOLATIONS = ("auto", "pid_namespace", "subreaper")
NONCE_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
NAME_CHARS_MAX = 64
NONCE_CHARS_MIN, NONCE_CHARS_MAX = 16, 128
SECRET_BYTES_MAX = 32 * 1024  # a pipe takes that much without a reader
CHUNK_BYTES_DEFAULT = 256 * 1024
SEGMENT_BYTES_DEFAULT = 8 * 1024 * 1024
QUOTA_BYTES_DEFAULT = 256 * 1024 * 1024
LINGER_S_DEFAULT = 60.0
CRASH_NAME = "keeper.crash"
FIELDS = frozenset(
    name
    for names in (
        ("v", "nonce", "execution", "process_generation", "argv", "cwd", "env", "secrets", "isolation", "confine"),
        ("line_chunk_bytes", "segment_bytes_max", "spool_quota_bytes", "spool_after", "linger_s"),
    )
    for name in names
)


class Spec:
    """A checked launch specification."""

    __slots__ = (
        "argv",
        "confine",
        "cwd",
        "env",
        "execution",
        "isolation",
        "line_chunk_bytes",
        "linger_s",
        "nonce",
        "process_generation",
        "secrets",
        "segment_bytes_max",
        "spool_after",
        "spool_quota_bytes",
    )

    def __init__(self, raw: Json) -> None:
        """Raises ValueError with every problem."""
        problems = [f"unknown field {name}" for name in raw if name not in FIELDS]
        if raw.get("v") != 1:
            problems.append("v must be 1")
        self.nonce = _name(raw, "nonce", NONCE_CHARS_MIN, NONCE_CHARS_MAX, problems)
        self.execution = _name(raw, "execution", 1, NAME_CHARS_MAX, problems)
        self.process_generation = int(_limit(raw, "process_generation", 0, 2**62, None, problems))
        argv = raw.get("argv")
        self.argv: list[str] = argv if isinstance(argv, list) else []
        if not self.argv or not all(_is_plain(item) for item in self.argv) or not self.argv[0]:
            problems.append("argv must be a list of strings without NUL, not empty")
        cwd = raw.get("cwd")
        self.cwd = cwd if isinstance(cwd, str) else ""
        if not self.cwd.startswith("/") or "\0" in self.cwd:
            problems.append("cwd must be an absolute path")
        env = raw.get("env")
        self.env: dict[str, str] = env if isinstance(env, dict) else {}
        if not isinstance(env, dict) or not all(
            _is_plain(k) and k and "=" not in k and _is_plain(v) for k, v in env.items()
        ):
            problems.append("env must map names to strings without NUL")
        secrets = raw.get("secrets", {})
        self.secrets: dict[str, str] = secrets if isinstance(secrets, dict) else {}
        if not isinstance(secrets, dict) or not all(
            _is_plain(k) and k and "=" not in k and _is_plain(v) and len(v.encode()) <= SECRET_BYTES_MAX
            for k, v in secrets.items()
        ):
            problems.append(f"secrets must map names to strings without NUL of at most {SECRET_BYTES_MAX} bytes")
        if MARKER in self.env or MARKER in self.secrets:
            problems.append(f"env must not set {MARKER}")
        self.isolation = str(raw.get("isolation", "auto"))
        if self.isolation not in ISOLATIONS:
            problems.append(f"isolation must be one of {' '.join(ISOLATIONS)}")
        self.confine = Confinement(raw.get("confine", {}), problems)
        chunk, segment, quota = CHUNK_BYTES_DEFAULT, SEGMENT_BYTES_DEFAULT, QUOTA_BYTES_DEFAULT
        self.line_chunk_bytes = int(_limit(raw, "line_chunk_bytes", 16, 1024 * 1024, chunk, problems))
        self.segment_bytes_max = int(_limit(raw, "segment_bytes_max", 1024, 2**30, segment, problems))
        self.spool_quota_bytes = int(_limit(raw, "spool_quota_bytes", 4096, 2**40, quota, problems))
        self.spool_after = int(_limit(raw, "spool_after", 0, 2**62, 0, problems))
        self.linger_s = _limit(raw, "linger_s", 0, 3600, LINGER_S_DEFAULT, problems)
        if problems:
            raise ValueError("; ".join(problems))


def main(arguments: list[str]) -> None:
    """Never returns normally to a caller that goes on: the process ends here."""
    if arguments[:1] == ["--probe"]:
        _probe(arguments[1:])
    umask = os.umask(0o077)
    # Some event loops let descriptors slip into a child; held here they would keep a peer's pipe open for hours.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    try:
        if len(arguments) != 2 or arguments[0] != "--dir":
            raise ValueError("usage: --dir DIR")
        folder = os.path.abspath(arguments[1])
        spec = Spec(loads(_read_all(0, SPEC_BYTES_MAX)))
    except ValueError as error:
        _answer({"ready": False, "error": "invalid_spec", "detail": str(error)})
        os._exit(2)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    code = 1
    keeper: Keeper | None = None
    try:
        keeper = _start(spec, folder, umask)
        if keeper is not None:
            keeper.run()
            code = 0
    except Exception as error:  # noqa: BLE001  the process boundary: whatever broke, nothing may survive the keeper
        if keeper is not None:
            keeper.emergency_kill()
        else:
            _refuse({"error": "failed", "detail": f"{type(error).__name__}: {error}"})
        _crashed(folder, error)
    finally:
        os._exit(code)


def _probe(arguments: list[str]) -> None:
    """Say what would hold a CLI's processes together here, and end."""
    try:
        isolation, in_user_namespace = choose_isolation(arguments[0], "other-user" in arguments)
    except OSError as error:
        _answer({"problem": str(error)})
    else:
        _answer({"isolation": isolation, "user_namespace": in_user_namespace})
    os._exit(0)


def _start(spec: Spec, folder: str, umask: int) -> Keeper | None:
    """The running keeper, detached; None after the reason was answered."""
    os.makedirs(f"{folder}/spool", mode=0o700, exist_ok=True)
    os.chmod(folder, 0o700)
    if not _take_lock(folder):
        error = "already_spawned" if os.path.exists(f"{folder}/spawn.json") else "locked"
        _refuse({"error": error, "detail": "a keeper lives here"})
        return None
    if os.path.exists(f"{folder}/spawn.json"):
        _refuse({"error": "already_spawned", "detail": "the spawn record exists"})
        return None
    listener = listen(folder)
    try:
        isolation, in_user_namespace = choose_isolation(spec.isolation, spec.confine.other_user)
        hide()
    except OSError as error:
        _refuse({"error": "isolation_unavailable", "detail": str(error)})
        return None
    spool = SpoolWriter(f"{folder}/spool", spec.nonce, spec.segment_bytes_max, spec.spool_quota_bytes, spec.spool_after)
    facts = _facts(spec, isolation)
    facts["user_namespace"] = in_user_namespace
    try:
        _write_spawn_record(folder, spec, facts)
    except FileExistsError:
        _refuse({"error": "already_spawned", "detail": "the spawn record exists"})
        return None
    environment = {**spec.env, MARKER: spec.nonce}
    try:
        child = spawn(Command(spec.argv, spec.cwd, environment, spec.secrets, umask, spec.confine), isolation)
    except ExecError as failure:
        _record_failure(spool, isolation, failure)
        return None
    if isolation == "pid_namespace":
        facts["proc_mounted"] = child.proc_mounted
    keeper = Keeper(child, spool, listener, facts, spec.spool_quota_bytes, spec.line_chunk_bytes, spec.linger_s)
    ready: Json = {"ready": True, "pid": os.getpid(), "nonce": spec.nonce, "socket": f"{folder}/{SOCKET_NAME}"}
    _answer({**ready, "pid_cli": child.pid, "isolation": isolation})
    _detach()
    return keeper


def _facts(spec: Spec, isolation: str) -> Json:
    return {
        "nonce": spec.nonce,
        "execution": spec.execution,
        "process_generation": spec.process_generation,
        "isolation": isolation,
        "boot_id": _read_path("/proc/sys/kernel/random/boot_id").decode().strip(),
    }


def _write_spawn_record(folder: str, spec: Spec, facts: Json) -> None:
    record = dumps(
        {
            "v": 1,
            **facts,
            "argv_sha256": sha256("\0".join(spec.argv).encode(errors="surrogateescape")).hexdigest(),
            "keeper_pid": os.getpid(),
            "at_us": now_us(),
        }
    )
    fd = os.open(f"{folder}/spawn.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, record + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    for path in (folder, os.path.dirname(folder)):
        folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)


def _record_failure(spool: SpoolWriter, isolation: str, failure: ExecError) -> None:
    """`spawn` has reaped what it started, so the proof follows at once."""
    error: Json = {"stage": failure.stage, "errno": failure.code, "message": os.strerror(failure.code)}
    method = "pid_namespace" if isolation == "pid_namespace" else "subreaper_sweep"
    spool.append(records.EXIT, meta=dumps({"rc": None, "signal": None, "exec_error": error}))
    spool.append(records.PROOF, meta=dumps({"method": method, "empty": True, "at": now_us()}))
    spool.flush(sync=True)
    _refuse({"error": "exec_failed", "detail": str(failure), **error})


def _take_lock(folder: str) -> bool:
    """Held until the process ends; the descriptor is never closed."""
    fd = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_RETRY_S)
        else:
            return True


def _answer(message: Json) -> None:
    try:
        os.write(1, dumps(message) + b"\n")
    except OSError:
        pass  # the collector went away; whoever adopts the keeper finds it by its lock


def _refuse(reason: Json) -> None:
    _answer({"ready": False, **reason})


def _detach() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _crashed(folder: str, error: Exception) -> None:
    """Leave the traceback beside the spool (source lines and names, no values)."""
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        fd = os.open(f"{folder}/{CRASH_NAME}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(fd, text.encode(errors="replace"))
        os.close(fd)
        sys.stderr.write(text)
    except OSError:
        pass


def _read_all(fd: int, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while piece := os.read(fd, 65536):
        parts.append(piece)
        size += len(piece)
        if size > limit_bytes:
            raise ValueError(f"the specification is longer than {limit_bytes} bytes")
    return b"".join(parts)


def _read_path(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _name(raw: Json, field: str, least: int, most: int, problems: list[str]) -> str:
    value = raw.get(field)
    if not isinstance(value, str) or not least <= len(value) <= most or not NONCE_CHARS.issuperset(value):
        problems.append(f"{field} must match [A-Za-z0-9_-]{{{least},{most}}}")
        return ""
    return value


def _limit(raw: Json, field: str, least: float, most: float, default: float | None, problems: list[str]) -> float:
    value = raw.get(field, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        problems.append(f"{field} must be a number from {least:g} to {most:g}")
        return 0
    return value

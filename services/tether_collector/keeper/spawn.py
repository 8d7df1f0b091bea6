"""Starting the CLI so that nothing of it can outlive the keeper, and so that its end can be proven.

    pid_namespace   keeper ── init (pid 1 of a new namespace) ── CLI ── whatever it starts
                    The init dies with the keeper (parent-death signal) and the namespace with the init; the kernel
                    lets `waitpid(init)` return only when nothing is left in it: that is the proof.
    subreaper       keeper ── CLI ── whatever it starts; orphans come back to the keeper, which sweeps until it has no
                    child left and /proc shows no process with its marker. Only the CLI itself dies with the
                    keeper; the proof says that this was the way.

Before exec, child and keeper talk over one socket pair:

    init  → "M0" | "M1"        whether /proc is the namespace's own
    child → "P"                the kernel attaches the child's pid, translated into the keeper's namespace
    keeper→ "G"                it holds a pidfd now; a signal can never hit another process
    child → end of file        exec succeeded (the socket closes on exec), or "E<stage>:<errno>"

A keeper that dies in between closes the pair: the child reads the end of file instead of "G" and goes.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import _socket
import os
import select

from . import linux

TYPE_CHECKING = False  # `typing` costs more than a MiB
if TYPE_CHECKING:
    from .confine import Confinement

MESSAGE_BYTES_MAX = 64
CREDENTIALS_BYTES = 12  # struct ucred: pid, uid, gid
SO_PASSCRED, SCM_CREDENTIALS = 16, 2


class ExecError(Exception):
    """The CLI could not be started; nothing of it runs."""

    def __init__(self, stage: str, code: int) -> None:
        super().__init__(f"{stage}: {os.strerror(code)}")
        self.stage = stage
        self.code = code


class Child:
    """The CLI as the keeper holds it."""

    __slots__ = ("init_pid", "init_pidfd", "pid", "pidfd", "proc_mounted", "status_fd", "stderr", "stdin", "stdout")

    def __init__(self) -> None:
        self.pid = 0  # the CLI, in the keeper's namespace
        self.pidfd = -1
        self.init_pid = 0  # 0 without a namespace
        self.init_pidfd = -1
        self.status_fd = -1  # the init writes the CLI's wait status here
        self.proc_mounted = False
        self.stdin = self.stdout = self.stderr = -1


class Command:
    """What is executed. `secrets`: variables that get the number of a descriptor, from which their value can be read
    once; it stands in no environment that a tool of the CLI, or /proc, could show."""

    __slots__ = ("argv", "confine", "cwd", "env", "secrets", "umask")

    def __init__(
        self, argv: list[str], cwd: str, env: dict[str, str], secrets: dict[str, str], umask: int, confine: Confinement
    ) -> None:
        self.argv = argv
        self.cwd = cwd
        self.env = env
        self.secrets = secrets
        self.umask = umask
        self.confine = confine


class _Ends:
    """The descriptors that the child's side needs; all of them close on exec."""

    __slots__ = ("alive", "report", "status", "stderr", "stdin", "stdout")

    def __init__(self, stdin: int, stdout: int, stderr: int, report: _socket.socket, status: int, alive: int) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.report = report
        self.status = status
        self.alive = alive


def choose_isolation(wanted: str, other_user: bool = False) -> tuple[str, bool]:
    """Enter the mode: "pid_namespace" or "subreaper"; and whether that took a user namespace, which has one user only,
    so none for a CLI of another user. Raises OSError where the wanted one is not permitted."""
    if wanted != "subreaper":
        try:
            linux.unshare(linux.CLONE_NEWPID)
        except OSError:
            if not other_user and _may_unshare_as_user():
                _unshare_as_user()
                return "pid_namespace", True
            if wanted == "pid_namespace":
                raise
        else:
            return "pid_namespace", False
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    return "subreaper", False


def _may_unshare_as_user() -> bool:
    """Tried in a child: who fails halfway has no identity left to go on with."""
    child = os.fork()
    if child == 0:
        try:
            _unshare_as_user()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _unshare_as_user() -> None:
    """A PID namespace in a user namespace of our own, in which we are who we were. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWPID)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def spawn(command: Command, isolation: str) -> Child:
    """Start the CLI. Raises ExecError after everything that was started is gone again."""
    child = Child()
    stdin_read, child.stdin = os.pipe2(os.O_CLOEXEC)
    child.stdout, stdout_write = os.pipe2(os.O_CLOEXEC)
    child.stderr, stderr_write = os.pipe2(os.O_CLOEXEC)
    child.status_fd, status_write = os.pipe2(os.O_CLOEXEC)
    alive_read, alive_write = os.pipe2(os.O_CLOEXEC)
    report, report_child = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    report.setsockopt(_socket.SOL_SOCKET, SO_PASSCRED, 1)
    ends = _Ends(stdin_read, stdout_write, stderr_write, report_child, status_write, alive_read)
    if command.confine.other_user:  # or it could not open /dev/stdout
        for fd in (stdin_read, stdout_write, stderr_write):
            os.fchown(fd, command.confine.uid, command.confine.gid)
    keeper_pid = os.getpid()
    first = os.fork()
    if first == 0:
        try:
            if isolation == "pid_namespace":
                _run_init(command, ends)
            else:
                _run_cli(command, ends, keeper_pid)
        finally:
            os._exit(127)
    report_child.close()
    for fd in (stdin_read, stdout_write, stderr_write, status_write, alive_read):
        os.close(fd)
    if isolation == "pid_namespace":
        child.init_pid = first
        child.init_pidfd = os.pidfd_open(first)
    else:
        os.close(child.status_fd)
        child.status_fd = -1
    failure = _shake_hands(report, child)
    report.close()
    os.close(alive_write)
    if failure is not None:
        _clear_away(child, first)
        raise failure
    for fd in (child.stdin, child.stdout, child.stderr):
        os.set_blocking(fd, False)
    if child.status_fd >= 0:
        os.set_blocking(child.status_fd, False)
    return child


def _shake_hands(report: _socket.socket, child: Child) -> ExecError | None:
    space = _socket.CMSG_SPACE(CREDENTIALS_BYTES)
    while True:
        message, ancillary, _flags, _address = report.recvmsg(MESSAGE_BYTES_MAX, space)
        if message.startswith(b"E"):
            stage, _, code = message[1:].decode().partition(":")
            return ExecError(stage, int(code))
        if message == b"":
            return None if child.pid else ExecError("init", 10)
        if message == b"P":
            for level, kind, data in ancillary:
                if (level, kind) == (_socket.SOL_SOCKET, SCM_CREDENTIALS):
                    child.pid = int.from_bytes(data[:4], "little")
            child.pidfd = os.pidfd_open(child.pid)
            report.send(b"G")
        else:
            child.proc_mounted = message == b"M1"


def _clear_away(child: Child, first: int) -> None:
    """After a failed start: the first child is gone when this returns, and with it a namespace."""
    try:
        os.kill(first, linux.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(first, 0)
    for fd in (child.stdin, child.stdout, child.stderr, child.status_fd, child.pidfd, child.init_pidfd):
        if fd >= 0:
            os.close(fd)


def _close_all_but(*kept: int) -> None:
    start = 0
    for fd in sorted(kept):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def _run_init(command: Command, ends: _Ends) -> None:
    """Pid 1 of the namespace: starts the CLI, reaps, reports the CLI's status, ends when nothing is left."""
    linux.prctl(linux.PR_SET_PDEATHSIG, linux.SIGKILL)
    linux.set_name(b"tether-init")
    linux.default_signals()
    report = ends.report
    _close_all_but(ends.stdin, ends.stdout, ends.stderr, report.fileno(), ends.status, ends.alive)
    # The keeper may have died before the parent-death signal was armed; it alone held the other end.
    poll = select.poll()
    poll.register(ends.alive, select.POLLIN)
    if poll.poll(0):
        return
    try:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount(b"none", b"/", None, linux.MS_REC | linux.MS_SLAVE)
        linux.mount(b"proc", b"/proc", b"proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        report.send(b"M1")
    except OSError:
        # The namespace still holds and still proves; the CLI merely sees the outer /proc.
        report.send(b"M0")
    cli = os.fork()
    if cli == 0:
        _run_cli(command, ends, 0)
        os._exit(127)
    _close_all_but(ends.status)
    os.chdir("/")
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(0)
        if pid == cli:
            os.write(ends.status, status.to_bytes(4, "little"))


def _run_cli(command: Command, ends: _Ends, keeper_pid: int) -> None:
    """Becomes the CLI; returns only if that failed, after it was reported."""
    stage = "setup"
    report = ends.report
    try:
        if keeper_pid:
            linux.prctl(linux.PR_SET_PDEATHSIG, linux.SIGKILL)
            if os.getppid() != keeper_pid:
                return
        linux.default_signals()
        os.setsid()
        report.send(b"P")
        if report.recv(1) != b"G":
            return
        os.dup2(ends.stdin, 0)
        os.dup2(ends.stdout, 1)
        os.dup2(ends.stderr, 2)
        stage = "confine"
        command.confine.apply(command.umask, dies_with_parent=keeper_pid != 0)
        if keeper_pid and os.getppid() != keeper_pid:
            return
        stage = "chdir"
        os.chdir(command.cwd)
        stage = "exec"
        os.execvpe(command.argv[0], command.argv, {**command.env, **_offered(command.secrets)})
    except OSError as error:
        report.send(f"E{stage}:{error.errno or 5}".encode())


def _offered(secrets: dict[str, str]) -> dict[str, str]:
    """Each secret in a pipe of its own that survives exec; the variables that name the reading ends."""
    found = {}
    for name, value in secrets.items():
        reading, writing = os.pipe2(0)
        os.write(writing, value.encode(errors="surrogateescape"))  # bounded: it fits the pipe
        os.close(writing)
        found[name] = str(reading)
    return found


def wait_result(status: int) -> dict[str, object]:
    """A wait status as the exit record says it."""
    if os.WIFSIGNALED(status):
        return {"rc": None, "signal": os.WTERMSIG(status)}
    return {"rc": os.WEXITSTATUS(status), "signal": None}


def arm_signals(wake_fd: int, on_terminate: object) -> None:
    """SIGCHLD only wakes the loop, SIGTERM, SIGINT and SIGHUP ask for the end of everything."""
    _signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    _signal.signal(linux.SIGCHLD, lambda *_: None)
    _signal.signal(linux.SIGPIPE, _signal.SIG_IGN)
    for number in (linux.SIGTERM, 2, 1):
        _signal.signal(number, on_terminate)

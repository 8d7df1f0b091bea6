"""The collector's end of a keeper: launch it, adopt it, ask it.

A keeper is identified by the nonce it was launched with and by nothing else. `launch` hands the specification over
the keeper's stdin (it may hold keys) and returns a connected owner. `adopt` is for a collector that finds a keeper's
folder after a restart: a free lock proves that no keeper lives there (`Gone`), a held one is waited for until it
answers.

A request whose reply did not come has an unknown outcome: `LinkLost` (or its kind `LinkTimeout`) says so, and the
caller asks again with the same control id after it has adopted the keeper anew. An answer that is a refusal is a
`KeeperRefusedError` with the keeper's code. Output never crosses the link: a push says up to which record the spool
can be read.

    KeeperLinkError
    ├── KeeperRefusedError   the keeper answered no; `code` and `detail` are its words
    ├── LaunchError          no keeper runs after this; `code` tells why (already_spawned, exec_failed, …)
    └── LinkLost             nobody knows; never a reason to do it again with another id
        └── LinkTimeout      the connection stands, the answer did not come in time
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

KEEPER_MAIN = Path(__file__).parent / "keeper" / "__main__.py"
SOCKET_NAME = "keeper.sock"
REQUEST_TIMEOUT_S = 10.0  # an fsync on a busy volume is the slowest thing a reply waits for
LAUNCH_TIMEOUT_S = 20.0
KILLED_S = 1.0  # to see the end of a launch that was given up
ADOPT_TIMEOUT_S = 5.0  # a keeper that holds its lock listens within this
ADOPT_RETRY_S = 0.02
REPLY_BYTES_MAX = 1024 * 1024
STDERR_BYTES_MAX = 4096
LOADER_NAMES = ("LD_LIBRARY_PATH",)  # an interpreter may not start without it; the CLI does not get it


class KeeperLinkError(Exception):
    """Anything that goes wrong with a keeper."""


class KeeperRefusedError(KeeperLinkError):
    """The keeper answered, and its answer is no."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail


class LaunchError(KeeperLinkError):
    """No keeper came to life. `errno` and `stage` are set for exec_failed."""

    def __init__(self, code: str, detail: str, errno: int | None = None, stage: str | None = None) -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail
        self.errno = errno
        self.stage = stage


class LinkLost(KeeperLinkError):  # noqa: N818  a fact, not a mistake of anybody
    """The connection is gone; the outcome of what was asked is unknown."""


class LinkTimeout(LinkLost):
    """No reply in time; the outcome is unknown."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What a keeper is told. `env` is complete: the keeper adds its marker and nothing else."""

    nonce: str
    execution: str
    process_generation: int
    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str] = field(repr=False)  # may hold keys
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # read from a descriptor, see `spawn.Command`
    isolation: Literal["auto", "pid_namespace", "subreaper"] = "auto"
    confine: Mapping[str, Any] = field(default_factory=dict)  # see `keeper.confine.Confinement`
    line_chunk_bytes: int = 256 * 1024
    segment_bytes_max: int = 8 * 1024 * 1024
    spool_quota_bytes: int = 256 * 1024 * 1024
    spool_after: int = 0  # the last record that is there already: of the process before, or noted ahead of this one
    linger_s: float = 60.0
    given: Mapping[str, str] = field(default_factory=dict, repr=False)  # the secrets among all of it, by name; not told

    def encode(self) -> bytes:
        """The JSON object that goes to the keeper's stdin."""
        names = (n for n in self.__slots__ if n not in ("argv", "env", "secrets", "given", "confine"))
        plain = {name: getattr(self, name) for name in names}
        lists = {"argv": list(self.argv), "env": dict(self.env), "secrets": dict(self.secrets)}
        lists["confine"] = dict(self.confine)
        return json.dumps({"v": 1, **plain, **lists}).encode()


@dataclass(frozen=True, slots=True)
class CliExit:
    """How the CLI ended: one of `rc` and `signal` is set."""

    rc: int | None
    signal: int | None
    record: int


@dataclass(frozen=True, slots=True)
class ExitProof:
    """Nothing of the CLI is left. `method` says how that is known."""

    method: Literal["pid_namespace", "subreaper_sweep"]
    at_us: int
    record: int


@dataclass(frozen=True, slots=True)
class KeeperStatus:
    """A keeper's answer to hello and status."""

    nonce: str
    execution: str
    process_generation: int
    isolation: Literal["pid_namespace", "subreaper"]
    boot_id: str  # of the kernel
    pid: int  # of the keeper; for people, never an identity
    pid_cli: int
    state: Literal["running", "draining", "exited", "proven"]
    last_record: int
    exited: CliExit | None
    proof: ExitProof | None
    spool_bytes: int
    backpressure: bool
    spool_blocked: bool
    stdin_open: bool
    stdin_queued_bytes: int


@dataclass(frozen=True, slots=True)
class StdinReply:
    """`written`: the CLI's pipe has it. `queued`: recorded, on its way; `stdin_done` tells. `known`: seen before."""

    status: Literal["written", "queued", "partial", "closed", "known"]
    result: Literal["written", "queued", "partial", "closed"]
    record: int | None  # None where known


@dataclass(frozen=True, slots=True)
class Gone:
    """No keeper lives in that folder. Where `spawned` is true, its CLI died with it and is never started again."""

    spawned: bool


class _Wire(asyncio.Protocol):
    """Frames lines and matches replies; knows no operation."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.last_record = 0
        self.superseded = False
        self.lost = False
        self.changed = asyncio.Event()
        self.replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._in = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports behave like asyncio's and do not inherit from them.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._in += data
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        for line in lines:
            self._on_line(line)
        if len(self._in) > REPLY_BYTES_MAX and self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.changed.set()
        for reply in self.replies.values():
            if not reply.done():
                reply.set_exception(LinkLost("the connection to the keeper is gone"))
        self.replies.clear()

    def _on_line(self, line: bytes) -> None:
        message = json.loads(line)
        push = message.get("push")
        if push == "records":
            self.last_record = max(self.last_record, message["last"])
            self.changed.set()
        elif push == "superseded":
            self.superseded = True
            self.changed.set()
        elif push is None:
            reply = self.replies.pop(message.get("id"), None)
            if reply is not None and not reply.done():
                reply.set_result(message)


class KeeperLink:
    """A connected keeper. One task waits for records, any number may ask."""

    def __init__(self, wire: _Wire, timeout_s: float) -> None:
        self._wire = wire
        self._timeout_s = timeout_s
        self._id = 0
        self.hello: KeeperStatus  # set by `connect`, which hands no link out without it

    @property
    def last_record(self) -> int:
        """The last record that is known to be readable in the spool."""
        return self._wire.last_record

    @property
    def superseded(self) -> bool:
        """True once another owner took over: every write is refused from then on."""
        return self._wire.superseded

    @property
    def lost(self) -> bool:
        """True once the connection is gone."""
        return self._wire.lost

    async def wait_records(self, after: int) -> int:
        """Wait until a record after `after` can be read; the last one. Raises LinkLost."""
        wire = self._wire
        while wire.last_record <= after:
            if wire.lost:
                raise LinkLost("the connection to the keeper is gone")
            wire.changed.clear()
            await wire.changed.wait()
        return wire.last_record

    async def pushes(self) -> AsyncIterator[int]:
        """Each new last record, merged where the reader is slower; ends when the link is lost or superseded."""
        seen = 0
        wire = self._wire
        while not (wire.lost or wire.superseded):
            if wire.last_record > seen:
                seen = wire.last_record
                yield seen
                continue
            wire.changed.clear()
            await wire.changed.wait()

    async def stdin(self, control_id: str, data: bytes, timeout_s: float | None = None) -> StdinReply:
        """Write to the CLI, once per control id whatever happens. LinkLost: ask again with the same id."""
        reply = await self._ask("stdin", timeout_s, control_id=control_id, data_b64=_b64(data))
        status = reply["status"]
        return StdinReply(status, reply.get("result", status), reply.get("record"))

    async def close_stdin(self) -> bool:
        """Close the CLI's stdin after what is queued; True where it is closed now. Idempotent."""
        return bool((await self._ask("close_stdin"))["status"] == "closed")

    async def signal(self, name: str) -> None:
        """Signal the CLI process alone, e.g. "TERM"."""
        await self._ask("signal", name=name)

    async def append(
        self,
        kind: Literal["timer", "adapter", "note"],
        meta: Mapping[str, object] | None = None,
        data: bytes = b"",
    ) -> int:
        """Record an input of the collector's own; its record number."""
        reply = await self._ask("append", kind=kind, meta=dict(meta or {}), data_b64=_b64(data))
        return int(reply["record"])

    async def pause(self) -> int:
        """Stop reading the CLI for a rotation, for 2 s at most; the last record."""
        return int((await self._ask("pause"))["last"])

    async def rotate(self, state: bytes, state_record: int) -> int:
        """Begin a segment with the state after `state_record` and read on; the state's record number.

        Refused with `stale_state` where more was recorded since, with `mid_line` inside a long line; reading goes on
        in either case.
        """
        reply = await self._ask("rotate", state_b64=_b64(state), state_record=state_record)
        return int(reply["record"])

    async def release(self, through_record: int, keep_bytes: int | None = None) -> tuple[int, ...]:
        """Everything up to the record is published: whole segments may go. First records of those deleted now.

        Released segments stay until the spool is larger than `keep_bytes` (default: the quota), because they can
        put back what the log lost.
        """
        extra = {} if keep_bytes is None else {"keep_bytes": keep_bytes}
        return tuple((await self._ask("release", through_record=through_record, **extra))["deleted"])

    async def kill(self) -> None:
        """Kill everything of the CLI at once; exit and proof follow in the spool. Idempotent."""
        await self._ask("kill")

    async def status(self) -> KeeperStatus:
        """The keeper as it is now."""
        return _status(await self._ask("status"))

    async def shutdown(self) -> None:
        """Let the keeper go; refused with `not_ended` before exit and proof."""
        await self._ask("shutdown")

    def close(self) -> None:
        """Drop the connection; the keeper and its CLI go on."""
        if self._wire.transport is not None:
            self._wire.transport.abort()

    async def connect(self, nonce: str, role: Literal["owner", "observer"]) -> None:
        """Say hello; the link is usable after it."""
        self.hello = _status(await self._ask("hello", nonce=nonce, role=role))
        self._wire.last_record = max(self._wire.last_record, self.hello.last_record)

    async def _ask(self, op: str, timeout_s: float | None = None, /, **arguments: object) -> dict[str, Any]:
        wire = self._wire
        if wire.lost or wire.transport is None:
            raise LinkLost("the connection to the keeper is gone")
        self._id += 1
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        wire.replies[self._id] = reply
        request_id = self._id
        wire.transport.write(json.dumps({"id": request_id, "op": op, **arguments}).encode() + b"\n")
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                message = await reply
        except TimeoutError:
            raise LinkTimeout(f"no reply to {op}") from None
        finally:
            wire.replies.pop(request_id, None)
        if message.get("ok") is not True:
            raise KeeperRefusedError(str(message.get("error")), str(message.get("detail") or ""))
        return message


async def launch(
    keeper_dir: Path, spec: LaunchSpec, *, timeout_s: float = REQUEST_TIMEOUT_S, python: str = sys.executable
) -> KeeperLink:
    """Start a keeper with its CLI and own it. LaunchError: nothing runs. LinkLost: unknown, so adopt.

    The keeper forks away from the process started here, which has ended and is reaped when this returns.
    """
    process = await asyncio.create_subprocess_exec(
        *(python, "-S", "-E", str(KEEPER_MAIN), "--dir", str(keeper_dir)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Nothing of the collector's environment, which holds credentials, reaches keeper or CLI.
        env={name: os.environ[name] for name in LOADER_NAMES if name in os.environ},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(LAUNCH_TIMEOUT_S):
            # The keeper lets go of these pipes right after its answer, so this ends with it.
            line, words = await process.communicate(spec.encode())
    except TimeoutError:
        raise LinkTimeout("the keeper did not say how its launch went") from None
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):  # what it forked away may hold its pipes for a moment
                async with asyncio.timeout(KILLED_S):
                    await process.wait()
    if not line:
        raise LaunchError("crashed", words.decode(errors="replace").strip()[-STDERR_BYTES_MAX:])
    answer = json.loads(line)
    if answer.get("ready") is not True:
        raise LaunchError(
            str(answer.get("error")), str(answer.get("detail") or ""), answer.get("errno"), answer.get("stage")
        )
    try:
        return await connect(keeper_dir, spec.nonce, timeout_s=timeout_s)
    except OSError as error:
        raise LinkLost(f"the keeper runs but its socket does not answer: {error.strerror}") from None


async def adopt(
    keeper_dir: Path, nonce: str, *, timeout_s: float = REQUEST_TIMEOUT_S, wait_s: float = ADOPT_TIMEOUT_S
) -> KeeperLink | Gone:
    """Own the keeper that lives in a folder, or learn that none does.

    KeeperRefusedError("wrong_nonce"): one lives there, and it is not the one asked for. LinkTimeout: it holds its
    lock and does not answer.
    """
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        if not keeper_lives(keeper_dir):
            return Gone(spawned=(keeper_dir / "spawn.json").exists())
        try:
            return await connect(keeper_dir, nonce, timeout_s=timeout_s)
        except (OSError, LinkTimeout, LinkLost) as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise LinkTimeout("a keeper holds its lock and does not answer") from error
        await asyncio.sleep(ADOPT_RETRY_S)


async def connect(
    keeper_dir: Path,
    nonce: str,
    role: Literal["owner", "observer"] = "owner",
    *,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> KeeperLink:
    """Connect to a keeper that listens. Raises OSError where it does not."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # The folder's path may be longer than a socket address can be.
        folder_fd = os.open(keeper_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            await loop.sock_connect(sock, f"/proc/self/fd/{folder_fd}/{SOCKET_NAME}")
        finally:
            os.close(folder_fd)
        _transport, wire = await loop.create_unix_connection(_Wire, sock=sock)
    except BaseException:
        sock.close()
        raise
    link = KeeperLink(wire, timeout_s)
    try:
        await link.connect(nonce, role)
    except BaseException:
        link.close()
        raise
    return link


def keeper_lives(keeper_dir: Path) -> bool:
    """True where a keeper holds its lock. A shared lock is enough to ask, so two who ask do not fool each other."""
    try:
        fd = os.open(keeper_dir / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def _status(reply: Mapping[str, Any]) -> KeeperStatus:
    exited, proof = reply["exited"], reply["proof"]
    plain = {name: reply[name] for name in KeeperStatus.__dataclass_fields__ if name not in ("exited", "proof")}
    return KeeperStatus(
        **plain,
        exited=exited and CliExit(exited["rc"], exited["signal"], exited["record"]),
        proof=proof and ExitProof(proof["method"], proof["at"], proof["record"]),
    )


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()

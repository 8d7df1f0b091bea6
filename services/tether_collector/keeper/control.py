"""The keeper's socket: who may connect, who owns, and the operations.

A connection's first request is `hello` with the nonce: that is the keeper's identity, a pid never is. The newest
owner wins; the one before is told `superseded` and its later writes are refused, so a collector that lost its place
cannot reach the CLI. Every reply repeats the request's id. A request whose reply never came is `unknown` to the
caller: it asks again with the same control id, or reads the spool.
"""

from __future__ import annotations

import _socket
import binascii
import os
import struct

from . import records
from .connection import Connection
from .jsonlite import Json, dumps, loads
from .loop import READ, Loop

TYPE_CHECKING = False  # `typing` costs more than a MiB
if TYPE_CHECKING:
    from collections.abc import Callable

    from .core import Keeper

CONNECTIONS_MAX = 16
BACKLOG = 16
UCRED = struct.Struct("3i")
SOCKET_NAME = "keeper.sock"
CONTROL_ID_CHARS_MAX = 256
SIGNALS = {"HUP": 1, "INT": 2, "QUIT": 3, "KILL": 9, "USR1": 10, "USR2": 12, "TERM": 15, "CONT": 18, "STOP": 19}
APPEND_KINDS = {"timer": records.TIMER, "adapter": records.ADAPTER, "note": records.NOTE}
META_BYTES_MAX = 65535


class RefusedError(Exception):
    """An operation's error: a code for programs and a detail for people."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(code)
        self.code = code
        self.detail = detail


def listen(folder: str) -> _socket.socket:
    """The listening socket in a folder whose path may be longer than a socket address."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            os.unlink(SOCKET_NAME, dir_fd=folder_fd)
        except FileNotFoundError:
            pass
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK)
        sock.bind(f"/proc/self/fd/{folder_fd}/{SOCKET_NAME}")
        os.chmod(SOCKET_NAME, 0o600, dir_fd=folder_fd)
        sock.listen(BACKLOG)
        return sock
    finally:
        os.close(folder_fd)


class Control:
    """Connections and operations."""

    def __init__(self, sock: _socket.socket, loop: Loop, keeper: Keeper) -> None:
        self._sock = sock
        self._loop = loop
        self._keeper = keeper
        self._connections: list[Connection] = []
        self._owner: Connection | None = None
        self._pushed = 0
        self._reads: dict[str, Callable[[Json], Json]] = {"status": self._status}
        self._writes: dict[str, Callable[[Json], Json]] = {
            "stdin": self._stdin,
            "close_stdin": self._close_stdin,
            "signal": self._signal,
            "append": self._append,
            "pause": self._pause,
            "rotate": self._rotate,
            "release": self._release,
            "kill": self._kill,
            "shutdown": self._shutdown,
        }
        loop.watch(sock.fileno(), READ, self._accept)

    @property
    def has_owner(self) -> bool:
        """True while an owner is connected."""
        return self._owner is not None

    def push(self) -> None:
        """Tell subscribers about new records, once per turn of the loop."""
        last = self._keeper.spool.last
        if last > self._pushed:
            self._pushed = last
            for connection in [c for c in self._connections if c.subscribed]:
                connection.push_records(last)

    def _accept(self, _mask: int) -> None:
        try:
            fd, _address = self._sock._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd)
        sock.setblocking(False)
        os.set_inheritable(fd, False)
        _pid, uid, _gid = UCRED.unpack(sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, UCRED.size))
        if uid != os.getuid() or len(self._connections) >= CONNECTIONS_MAX:
            sock.close()
            return
        self._connections.append(Connection(sock, self._loop, self._on_line, self._on_gone))

    def _on_gone(self, connection: Connection) -> None:
        self._connections.remove(connection)
        if self._owner is connection:
            self._owner = None
            self._keeper.owner_left()

    def _on_line(self, connection: Connection, line: bytes) -> None:
        request_id: object = None
        try:
            try:
                request = loads(line)
            except ValueError as error:
                raise RefusedError("bad_request", str(error)) from None
            request_id = request.get("id")
            if not isinstance(request_id, (int, str)):
                raise RefusedError("bad_request", "id must be a number or a string")
            reply = self._answer(connection, request)
        except RefusedError as refused:
            reply = {"ok": False, "error": refused.code, "detail": refused.detail}
        connection.send({"id": request_id, "ok": True, **reply})
        if not connection.role and not reply.get("ok", True):
            connection.close()

    def _answer(self, connection: Connection, request: Json) -> Json:
        op = request.get("op")
        if op == "hello":
            return self._hello(connection, request)
        if not connection.role:
            raise RefusedError("hello_first")
        if not isinstance(op, str) or (op not in self._reads and op not in self._writes):
            raise RefusedError("unknown_op", str(op)[:64])
        if op in self._reads:
            return self._reads[op](request)
        if connection is not self._owner:
            raise RefusedError("superseded" if connection.role == "superseded" else "not_owner")
        return self._writes[op](request)

    def _hello(self, connection: Connection, request: Json) -> Json:
        if request.get("nonce") != self._keeper.nonce:
            raise RefusedError("wrong_nonce")
        role = request.get("role", "observer")
        if role not in ("owner", "observer"):
            raise RefusedError("bad_request", "role must be owner or observer")
        if role == "owner" and self._owner is not connection:
            if self._owner is not None:
                self._owner.role = "superseded"
                self._owner.send({"push": "superseded"})
            self._owner = connection
        connection.role = str(role)
        connection.subscribed = bool(request.get("subscribe", True))
        return self._status(request)

    def _status(self, _request: Json) -> Json:
        return self._keeper.status()

    def _stdin(self, request: Json) -> Json:
        control_id = _text(request, "control_id")
        if not 0 < len(control_id) <= CONTROL_ID_CHARS_MAX:
            raise RefusedError("bad_request", "control_id must have 1 to 256 characters")
        answer = self._keeper.stdin.submit(control_id, _data(request, "data"))
        if isinstance(answer, str):
            raise RefusedError(answer)
        return answer

    def _close_stdin(self, _request: Json) -> Json:
        return {"status": self._keeper.stdin.close_after_queue()}

    def _signal(self, request: Json) -> Json:
        number = SIGNALS.get(_text(request, "name").removeprefix("SIG"))
        if number is None:
            raise RefusedError("unknown_signal", f"one of {' '.join(SIGNALS)}")
        if not self._keeper.signal_cli(number):
            raise RefusedError("exited")
        return {}

    def _append(self, request: Json) -> Json:
        kind = APPEND_KINDS.get(_text(request, "kind"))
        if kind is None:
            raise RefusedError("bad_request", f"kind must be one of {' '.join(APPEND_KINDS)}")
        meta = request.get("meta", {})
        if not isinstance(meta, dict):
            raise RefusedError("bad_request", "meta must be an object")
        try:
            encoded = dumps(meta) if meta else b""
        except (ValueError, RecursionError):
            raise RefusedError("bad_request", "meta holds what JSON cannot say") from None
        if len(encoded) > META_BYTES_MAX:
            raise RefusedError("too_large", f"meta has at most {META_BYTES_MAX} bytes")
        spool = self._keeper.spool
        if not spool.flush():
            raise RefusedError("spool_blocked")
        number = spool.append(kind, _data(request, "data"), encoded)
        if not spool.flush():
            spool.discard_last()
            raise RefusedError("spool_blocked")
        return {"record": number}

    def _pause(self, _request: Json) -> Json:
        return {"last": self._keeper.pause()}

    def _rotate(self, request: Json) -> Json:
        state_record = _number(request, "state_record")
        self._keeper.resume()
        spool = self._keeper.spool
        if not spool.flush():
            raise RefusedError("spool_blocked")
        if state_record != spool.last:
            raise RefusedError("stale_state", f"last record is {spool.last}")
        if self._keeper.mid_line:
            # The state would lack the beginning of a line whose end lies in the new segment.
            raise RefusedError("mid_line")
        number = spool.rotate(_data(request, "state"), dumps({"state_record": state_record}))
        if number is None:
            raise RefusedError("spool_blocked")
        return {"record": number}

    def _release(self, request: Json) -> Json:
        keep_bytes = _number(request, "keep_bytes") if "keep_bytes" in request else self._keeper.quota_bytes
        deleted = self._keeper.spool.release(_number(request, "through_record"), keep_bytes)
        return {"deleted": deleted, "bytes": self._keeper.spool.total_bytes}

    def _kill(self, _request: Json) -> Json:
        self._keeper.kill_all()
        return {}

    def _shutdown(self, _request: Json) -> Json:
        if not self._keeper.proven:
            raise RefusedError("not_ended")
        self._keeper.finish()
        return {}


def _text(request: Json, name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise RefusedError("bad_request", f"{name} must be a string")
    return value


def _number(request: Json, name: str) -> int:
    value = request.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RefusedError("bad_request", f"{name} must be a number from 0")
    return value


def _data(request: Json, name: str) -> bytes:
    """`{name}_b64` or `{name}` as text; empty where neither is there."""
    coded = request.get(f"{name}_b64")
    if isinstance(coded, str):
        try:
            return binascii.a2b_base64(coded, strict_mode=True)
        except ValueError:
            raise RefusedError("bad_request", f"{name}_b64 is not base64") from None
    value = request.get(name, "")
    if coded is not None or not isinstance(value, str):
        raise RefusedError("bad_request", f"{name} must be text, or {name}_b64 base64")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise RefusedError("bad_request", f"{name} is not valid text") from None

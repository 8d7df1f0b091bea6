"""Misbehaviour: lines that are no lines, and processes that outlive their parent."""

from __future__ import annotations

import json
import os
import signal
import time

from scripted_agent.channel import dumps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from scripted_agent.agent import Agent

HUGE_MIB = 10
DEEP_LEVELS = 100_000
HEARTBEAT_S = 0.1
# A stray process ends by itself, so that a failed test leaves nothing behind for good.
STRAY_LIFE_S = 120.0


def garbage_line(kind: str, huge_mib: int) -> bytes:
    """A line, without its newline, that no reader has to understand and every reader has to survive."""
    match kind:
        case "invalid_json":
            return b'{"type":"text","segment":"broken","text":'
        case "not_object":
            return b'["type","text"]'
        case "empty":
            return b""
        case "nul":
            return b'{"type":"text","segment":"nul","text":"\x00\x00"}'
        case "half_utf8":
            return b'{"type":"text","segment":"half","text":"' + "é€".encode()[:-1] + b'"}'
        case "huge":
            return b'{"type":"huge","data":"' + b"x" * (huge_mib << 20) + b'"}'
        case "deep":
            return b'{"type":"deep","value":' + b"[" * DEEP_LEVELS + b"]" * DEEP_LEVELS + b"}"
        case "unknown_type":
            return b'{"type":"made.up","value":1}'
        case "nan":
            return b'{"type":"usage","input_tokens":NaN,"output_tokens":Infinity,"cost_usd":-Infinity}'
        case _:
            raise AssertionError(kind)


def print_without_newline(agent: Agent) -> None:
    """A good line whose newline is late (the next line brings it) or, before an exit, missing."""
    turn = agent.turn
    turn.output_tokens += 1
    turn.last_text = f"no newline after {agent.next_id('x')}"
    line = dumps({"type": "text", "segment": agent.next_id("s"), "text": turn.last_text})
    agent.channel.emit_raw(line.encode(), {}, newline=False)


def spawn_stray(agent: Agent, life_s: float, *, is_orphan: bool) -> None:
    """A process in its own session that holds the stdout pipe; an orphan also ignores signals.

    An orphan's parent is gone at once (double fork). Both write a heartbeat to `stray-{prompt}-{pid}.beat` in the
    truth folder while they live; its pid is the one of its own namespace.
    """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if is_orphan and os.fork() != 0:
            os._exit(0)
        try:
            _stray(agent, life_s, ignores_signals=is_orphan)
        finally:
            os._exit(0)
    if is_orphan:
        os.waitpid(pid, 0)
    agent.truth.record("spawned", {"orphan": is_orphan, "life_s": life_s})


def _stray(agent: Agent, life_s: float, *, ignores_signals: bool) -> None:
    signal.set_wakeup_fd(-1)
    for name in ("SIGTERM", "SIGHUP", "SIGINT"):
        ignored = ignores_signals or name in agent.ignored_signals
        signal.signal(getattr(signal, name), signal.SIG_IGN if ignored else signal.SIG_DFL)
    os.close(0)
    descriptor = -1
    if agent.truth.folder is not None:
        # The prompt id is the caller's text; a file's name takes only what is safe in it.
        prompt = "".join(letter if letter.isalnum() else "_" for letter in agent.turn.acting_prompt)[:64]
        path = f"{agent.truth.folder}/stray-{prompt}-{os.getpid()}.beat"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    end = time.monotonic() + life_s
    while time.monotonic() < end:
        if descriptor >= 0:
            os.write(descriptor, json.dumps({"pid": os.getpid(), "at": time.time()}).encode() + b"\n")
        time.sleep(HEARTBEAT_S)

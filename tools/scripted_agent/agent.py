"""The process: prompts in order, one turn at a time, and what may happen to a turn from outside.

    idle ──prompt──▶ turn ──steps done──▶ result ──▶ idle        next queued prompt starts at once
                      │──interrupt──▶ result interrupted ──▶ idle
                      │──!exit, !crash, SIGTERM──▶ gone, no result
    idle ──stdin closed, nothing queued, no background work──▶ exit 0 (1 after a result "error")

Messages are handled between two lines and while a step waits, never inside a line. An interrupt is an exception
that unwinds the running step, so a step cannot forget it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque

from scripted_agent import VERSION, directives
from scripted_agent.channel import Channel
from scripted_agent.script import ScriptError, Step, parse
from scripted_agent.session import RefusedError, Session, open_session
from scripted_agent.truth import Truth
from scripted_agent.turn import Ask, Exiting, Interrupted, Turn, TurnOver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

QUEUE_PROMPTS_MAX = 256
USAGE = """usage: scripted_agent [--session-id ID | --resume ID] [--home DIR] [--truth DIR] [--version]
stdin and stdout carry one JSON object a line; docs/scripted-agent.md is the reference.
Environment: TETHER_SCRIPTED_HOME (as --home), TETHER_SCRIPTED_TRUTH (as --truth), HOME (default for --home)."""
_EXIT_OF_SIGNAL = {"SIGTERM": 143, "SIGHUP": 129}


class Agent:
    """One process of the scripted agent."""

    def __init__(self, session: Session, truth: Truth) -> None:
        self.session = session
        self.truth = truth
        self.channel = Channel(truth, self._on_signal)
        self.ignored_signals: set[str] = set()
        self.counter = 0  # numbers tokens and lines, so that each is unique in the process
        self.asks: dict[str, Ask] = {}
        self._queue: deque[dict[str, object]] = deque()
        self._steered: deque[dict[str, object]] = deque()
        self._turn: Turn | None = None
        self._background: list[tuple[float, str]] = []
        self._ids: dict[str, int] = {}
        self._last_status = "ok"
        self._session_is_told = False
        self._sigint_got = False

    @property
    def turn(self) -> Turn:
        assert self._turn is not None, "steps run inside a turn"
        return self._turn

    def run(self) -> int:
        """Serve prompts until stdin is closed; returns the exit code. Raises Exiting."""
        while True:
            self.handle()
            self._emit_finished_background()
            if self._sigint_got:
                return 0
            if self._queue:
                self._run_turn(self._queue.popleft())
                continue
            if not self.channel.stdin_is_open and not self._background:
                return 1 if self._last_status == "error" else 0
            due = min((due for due, _ in self._background), default=None)
            if not self.channel.inbox:
                self.channel.pump(None if due is None else max(0.001, due - time.monotonic()))

    # --- what steps use -------------------------------------------------------------------------------------

    def emit(self, message: dict[str, object]) -> None:
        """Print one line, then look at what came in; raises Interrupted."""
        self.channel.emit(message)
        self.handle()

    def next_id(self, letter: str) -> str:
        self._ids[letter] = self._ids.get(letter, 0) + 1
        return f"{letter}{self._ids[letter]}"

    def wait(self, seconds: float | None, until: Callable[[], bool] | None = None, every_s: float = 60.0) -> None:
        """Wait, with messages handled meanwhile; `until` is asked after each message and every `every_s`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self.handle()
            self._run_steered()
            if until is not None and until():
                return
            left = every_s if deadline is None else min(every_s, deadline - time.monotonic())
            if left <= 0:
                return
            self.channel.pump(left)

    def run_steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            self._run_steered()
            if step.name == "repeat":
                for loop_pass in range(1, step.count(0) + 1):
                    outer, self.turn.loop_pass = self.turn.loop_pass, loop_pass
                    self.run_steps(step.body)
                    self.turn.loop_pass = outer
            else:
                self.turn.step += 1
                directives.perform(self, step)

    def expand(self, text: str) -> str:
        """`{i}` → the pass of the innermost loop."""
        return text.replace("{i}", str(self.turn.loop_pass)) if self.turn.loop_pass else text

    def print_result(self, status: str, extra: dict[str, object] | None = None) -> None:
        """The terminal line of the turn, once, after its usage."""
        turn = self.turn
        if turn.has_result:
            return
        turn.has_result = True
        turn.status = self._last_status = status
        self.session.end_turn(status, turn.last_text)
        usage = turn.usage()
        self.channel.emit({"type": "usage", "prompt": turn.prompt, **usage})
        result = {"type": "result", "status": status, "prompt": turn.prompt, "text": turn.last_text, "usage": usage}
        self.channel.emit(result | (extra or {}))

    def add_background(self, seconds: float) -> None:
        job = self.next_id("b")
        self._background.append((time.monotonic() + seconds, job))
        self.emit({"type": "background", "id": job, "state": "started"})

    # --- messages and signals ---------------------------------------------------------------------------------

    def handle(self) -> None:
        """Act on what stdin and signals brought; raises Interrupted if the running turn is over."""
        self.channel.pump(0)
        interrupt = False
        while self.channel.inbox:
            message = self.channel.inbox.popleft()
            kind = message["type"]
            if kind == "prompt":
                self._take_prompt(message)
            elif kind == "answer":
                self._take_answer(message)
            else:
                self.channel.emit({"type": "interrupted", "id": message["id"]})
                interrupt = True
        if interrupt or (self._sigint_got and self._turn is not None):
            self._interrupt()
        if not self.channel.stdin_is_open:
            for ask in self.asks.values():
                if ask.answer is None:
                    self._settle(ask, {"decision": "deny", "text": "stdin was closed before an answer came"})

    def _take_prompt(self, message: dict[str, object]) -> None:
        if self._turn is None and not self._queue:
            self._queue.append(message)
            return
        if len(self._queue) + len(self._steered) >= QUEUE_PROMPTS_MAX:
            self.channel.complain(f"prompt {message['id']!r} refused: {QUEUE_PROMPTS_MAX} prompts are waiting")
            return
        is_steered = self._turn is not None and self._turn.is_steerable and not self._turn.has_result
        (self._steered if is_steered else self._queue).append(message)
        mode = "steered" if is_steered else "queued"
        self.channel.emit({"type": "prompt.accepted", "id": message["id"], "mode": mode})

    def _take_answer(self, message: dict[str, object]) -> None:
        ask = self.asks.get(str(message["request"]))
        if ask is None or ask.answer is not None:
            self.truth.record("answer_ignored", {"request": message["request"]})
            self.channel.complain(f"answer to {message['request']!r} ignored: nothing waits for it")
            return
        self._settle(ask, message)

    def _settle(self, ask: Ask, answer: dict[str, object]) -> None:
        ask.answer = answer
        self.channel.emit({"type": "ask.resolved", "request": ask.request, "decision": answer["decision"]})

    def _interrupt(self) -> None:
        for ask in self.asks.values():
            if ask.answer is None:
                self.channel.emit({"type": "ask.cancelled", "request": ask.request})
        self.asks.clear()
        if self._turn is not None:
            raise Interrupted

    def _on_signal(self, name: str) -> None:
        is_ignored = name in self.ignored_signals
        self.truth.record("signal", {"signal": name, "ignored": is_ignored})
        if is_ignored:
            return
        if name == "SIGINT":
            self._sigint_got = True
            return
        raise Exiting(_EXIT_OF_SIGNAL[name])

    # --- turns ----------------------------------------------------------------------------------------------------

    def _run_turn(self, message: dict[str, object]) -> None:
        prompt, text = str(message["id"]), str(message["text"])
        history = message.get("history")
        if isinstance(history, str):
            self.session.take_history(history)
        self.session.begin_turn(prompt, text)
        if not self._session_is_told:
            self._session_is_told = True
            line: dict[str, object] = {"type": "session", "session_id": self.session.id}
            line.update(agent="scripted", version=VERSION)
            if self.session.resumed is not None:
                line["resumed"] = self.session.resumed
            self.channel.emit(line)
        self._turn = turn = Turn(prompt)
        turn.input_tokens = len(text.split())
        self.channel.emit({"type": "turn.started", "prompt": prompt})
        try:
            steps = parse(text)
            self.emit({"type": "model", "state": "started"})
            self.run_steps(steps)
            self._run_steered()
            turn.is_steerable = False
            if not turn.has_result:
                self.emit({"type": "model", "state": "completed"})
            self.print_result("ok")
        except ScriptError as error:
            self.print_result("error", {"code": "script_error", "message": str(error)})
        except Interrupted:
            self._close_cut_turn(turn)
        except TurnOver:
            pass
        self.asks.clear()
        self._turn = None
        # What was to be steered into a turn that was cut before a step saw it runs as a turn of its own.
        while self._steered:
            self._queue.appendleft(self._steered.pop())

    def _close_cut_turn(self, turn: Turn) -> None:
        """After an interrupt nothing that was begun stays open; text already printed is kept."""
        for tool, (name, effect) in turn.open_tools.items():
            if effect:
                self.truth.effect_end(effect, name, "interrupted")
            self.channel.emit({"type": "tool.end", "id": tool, "status": "interrupted", "output": ""})
        if turn.segment is not None:
            text = "".join(turn.segment_parts)
            self.channel.emit({"type": "text", "segment": turn.segment, "text": text, "aborted": True})
        self.print_result("interrupted")

    def _run_steered(self) -> None:
        """Run prompts that were steered into the turn: their own ids and steps, the turn's result."""
        turn = self.turn
        while self._steered:
            message = self._steered.popleft()
            outer = (turn.acting_prompt, turn.step, turn.loop_pass)
            turn.acting_prompt, turn.step, turn.loop_pass = str(message["id"]), 0, 0
            try:
                self.run_steps(parse(str(message["text"])))
            except ScriptError as error:
                directives.say(self, f"script error: {error}")
            turn.acting_prompt, turn.step, turn.loop_pass = outer

    def _emit_finished_background(self) -> None:
        now = time.monotonic()
        for due, job in list(self._background):
            if due <= now:
                self._background.remove((due, job))
                self.channel.emit({"type": "background", "id": job, "state": "done"})


def main(argv: list[str]) -> None:
    """Run as a process; does not return. Exit code 2: wrong usage."""
    options = _options(argv)
    try:
        session = open_session(options["--home"], options.get("--session-id"), options.get("--resume"))
    except RefusedError as refused:
        _refuse(options, refused)
    truth = Truth(options.get("--truth"), session.id)
    fields: dict[str, object] = {"session": session.id, "pid": os.getpid(), "resumed": session.resumed}
    truth.record("start", fields | {"argv": argv, "version": VERSION})
    agent = Agent(session, truth)
    try:
        code = agent.run()
    except Exiting as exiting:
        code = exiting.code
    agent.channel.record_exit(code)
    os._exit(code)  # nothing is buffered, and the interpreter's farewell costs more than its start


def _refuse(options: dict[str, str], refused: RefusedError) -> None:
    given = options.get("--resume") or options.get("--session-id") or ""
    stem = given if refused.code != "invalid_session_id" else "refused"
    truth = Truth(options.get("--truth"), stem)
    truth.record("start", {"session": stem, "pid": os.getpid(), "refused": refused.code})
    channel = Channel(truth, lambda _name: None)
    channel.emit({"type": "error", "code": refused.code, "message": str(refused)})
    channel.record_exit(1)
    os._exit(1)


def _options(argv: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        if word in ("--version", "--help"):
            print(f"scripted {VERSION}" if word == "--version" else USAGE)
            sys.exit(0)
        name, equals, value = word.partition("=")
        if name not in ("--session-id", "--resume", "--home", "--truth"):
            sys.exit(_usage(f"unknown option {word!r}"))
        if not equals:
            value = next(words, "")
        if not value:
            sys.exit(_usage(f"{name} needs a value"))
        options[name] = value
    if "--session-id" in options and "--resume" in options:
        sys.exit(_usage("--session-id and --resume exclude each other"))
    environment = os.environ
    if "--truth" not in options and environment.get("TETHER_SCRIPTED_TRUTH"):
        options["--truth"] = environment["TETHER_SCRIPTED_TRUTH"]
    if "--home" not in options:
        default = f"{environment.get('HOME') or '/tmp'}/.scripted-agent"
        options["--home"] = environment.get("TETHER_SCRIPTED_HOME") or default
    return options


def _usage(problem: str) -> int:
    print(f"scripted: {problem}\n{USAGE}", file=sys.stderr)
    return 2

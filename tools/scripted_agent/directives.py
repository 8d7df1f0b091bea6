"""What each directive does. `perform` finds the function by the step's name; the script was checked before."""

from __future__ import annotations

import os
import signal

from scripted_agent import faults
from scripted_agent.channel import dumps
from scripted_agent.script import Step, questions
from scripted_agent.turn import Ask, Exiting, TurnOver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from scripted_agent.agent import Agent

FLOOD_SEGMENT_TOKENS = 1000
FILE_POLL_S = 0.01
RETRY_DELAY_MS = 10


def perform(agent: Agent, step: Step) -> None:
    _PERFORMERS[step.name](agent, step)


# --- text -------------------------------------------------------------------------------------------------------


def say(agent: Agent, text: str) -> None:
    """Deltas of one word each, then the completed text."""
    *words, last = text.split(" ")
    _stream(agent, [*(f"{word} " for word in words), last], 0)


def _say(agent: Agent, step: Step) -> None:
    say(agent, agent.expand(step.text(0)))


def _stream(agent: Agent, tokens: list[str], interval_s: float) -> None:
    turn = agent.turn
    outer = (turn.segment, turn.segment_parts)
    segment = agent.next_id("s")
    turn.segment, turn.segment_parts = segment, []
    for token in tokens:
        # Part of the text before the line is out: an interrupt handled by `emit` closes the segment with it.
        turn.segment_parts.append(token)
        turn.output_tokens += 1
        agent.emit({"type": "delta", "segment": segment, "text": token})
        if interval_s:
            agent.wait(interval_s)
    turn.segment, turn.segment_parts = outer
    turn.last_text = "".join(tokens)
    agent.emit({"type": "text", "segment": segment, "text": turn.last_text})


def _numbered(agent: Agent, letter: str) -> str:
    agent.counter += 1
    return f"{letter}{agent.counter:06d} "


def _deltas(agent: Agent, step: Step) -> None:
    _stream(agent, [_numbered(agent, "e") for _ in range(step.count(0))], step.number(1) / 1000)


def _flood(agent: Agent, step: Step) -> None:
    left = step.count(0)
    while left > 0:
        size = min(left, FLOOD_SEGMENT_TOKENS)
        _stream(agent, [_numbered(agent, "f") for _ in range(size)], 0)
        left -= size


def _lines(agent: Agent, step: Step) -> None:
    turn = agent.turn
    for _ in range(step.count(0)):
        turn.output_tokens += 1
        turn.last_text = _numbered(agent, "l").strip()
        agent.emit({"type": "text", "segment": agent.next_id("s"), "text": turn.last_text})
        if step.number(1):
            agent.wait(step.number(1) / 1000)


def _reasoning(agent: Agent, step: Step) -> None:
    agent.emit({"type": "reasoning", "text": agent.expand(step.text(0))})


def _friendly(agent: Agent, step: Step) -> None:
    """The answer to a prompt without a directive: a look around (nothing is changed), then an echo."""
    tool = _start_tool(agent, "look", {"path": "."})
    _end_tool(agent, tool, "ok", f"{len(os.listdir('.'))} entries")  # noqa: PTH208
    say(agent, f"You said: {step.text(0).strip() or '(nothing)'}")


def _env(agent: Agent, step: Step) -> None:
    from hashlib import sha256

    name = step.text(0)
    value = os.environb.get(name.encode())
    state = "is not set" if value is None else f"is set, sha256 {sha256(value).hexdigest()[:12]}"
    say(agent, f"{name} {state}")


def _recall(agent: Agent, _step: Step) -> None:
    earlier = [turn["prompt"] for turn in agent.session.turns[:-1]]
    say(agent, f"I remember {len(earlier)} earlier turns: {' '.join(earlier[-10:]) or 'none'}")


# --- tools and asks -----------------------------------------------------------------------------------------------


def _start_tool(agent: Agent, name: str, tool_input: dict[str, object]) -> str:
    tool = agent.next_id("t")
    agent.turn.open_tools[tool] = (name, "")
    agent.emit({"type": "tool.start", "id": tool, "name": name, "input": tool_input})
    return tool


def _end_tool(agent: Agent, tool: str, status: str, output: str) -> None:
    name, effect = agent.turn.open_tools.pop(tool)
    if effect:
        agent.truth.effect_end(effect, name, status)
    agent.emit({"type": "tool.end", "id": tool, "status": status, "output": output})


def _work(agent: Agent, tool: str, name: str, step: int, tool_input: object, seconds: float, output_bytes: int) -> None:
    """The side effect, the time it takes, the output."""
    effect = agent.truth.side_effect(agent.turn.acting_prompt, step, name, tool_input)
    agent.turn.open_tools[tool] = (name, effect)
    if seconds:
        agent.emit({"type": "tool.progress", "id": tool, "text": f"{name} is at work"})
        agent.wait(seconds)
    output = _filler(output_bytes) if output_bytes else f"{name} did {effect}"
    _end_tool(agent, tool, "ok", output)


def _filler(size: int) -> str:
    """Exactly `size` bytes in which every line of 16 is different."""
    lines = "".join(f"{number:015d}\n" for number in range(size // 16 + 1))
    return lines[:size]


def _tool(agent: Agent, step: Step) -> None:
    name, number = step.text(0), agent.turn.step
    tool_input: dict[str, object] = {"step": number}
    tool = _start_tool(agent, name, tool_input)
    _work(agent, tool, name, number, tool_input, step.number(1) / 1000, step.count(2))


def _open_ask(agent: Agent, kind: str, fields: dict[str, object]) -> Ask:
    ask = Ask(f"{agent.next_id('r')}-{os.urandom(4).hex()}")
    agent.asks[ask.request] = ask
    agent.emit({"type": "ask", "request": ask.request, "kind": kind, **fields})
    return ask


def _ask(agent: Agent, step: Step) -> None:
    """All tools that are named ask at once; they run in order when all answers are there."""
    turn = agent.turn
    asked: list[tuple[str, str, int, Ask]] = []
    for position, name in enumerate(step.text(0).split()):
        if position:
            turn.step += 1
        tool_input: dict[str, object] = {"step": turn.step}
        tool = _start_tool(agent, name, tool_input)
        ask = _open_ask(agent, "approval", {"tool": name, "tool_id": tool, "input": tool_input})
        asked.append((tool, name, turn.step, ask))
    agent.wait(None, lambda: all(ask.answer is not None for _, _, _, ask in asked))
    for tool, name, number, ask in asked:
        del agent.asks[ask.request]
        answer = ask.answer or {}
        if answer["decision"] == "allow":
            _work(agent, tool, name, number, answer.get("input") or {"step": number}, 0, 0)
        else:
            _end_tool(agent, tool, "error", str(answer.get("text") or "denied"))


def _question(agent: Agent, step: Step) -> None:
    ask = _open_ask(agent, "question", {"questions": questions(agent.expand(step.text(0)))})
    agent.wait(None, lambda: ask.answer is not None)
    del agent.asks[ask.request]
    answer = ask.answer or {}
    if answer["decision"] == "allow":
        say(agent, f"Answers: {dumps(answer.get('answers') or answer.get('text') or {})}")
    else:
        say(agent, f"No answer: {answer.get('text') or 'declined'}")


# --- waiting and the turn -----------------------------------------------------------------------------------------


def _steer(agent: Agent, _step: Step) -> None:
    agent.turn.is_steerable = True


def _sleep(agent: Agent, step: Step) -> None:
    agent.wait(step.number(0))


def _hang(agent: Agent, _step: Step) -> None:
    agent.wait(None, lambda: False)


def _stay(agent: Agent, _step: Step) -> None:
    """Deaf: stdin is read into the truth and nothing is answered; only a signal ends it."""
    while True:
        agent.channel.pump(None)
        agent.channel.inbox.clear()


def _wait_file(agent: Agent, step: Step) -> None:
    path = agent.expand(step.text(0))
    agent.wait(None, lambda: os.path.exists(path), every_s=FILE_POLL_S)  # noqa: PTH110


def _touch(agent: Agent, step: Step) -> None:
    path = agent.expand(step.text(0))
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # noqa: PTH103, PTH120
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
    agent.truth.record("touched", {"path": path})


def _usage(agent: Agent, step: Step) -> None:
    agent.turn.input_tokens, agent.turn.output_tokens = step.count(0), step.count(1)
    if len(step.args) > 2:
        agent.turn.cost_usd = step.number(2)


def _result(agent: Agent, step: Step) -> None:
    """Nothing is handled behind the line, so that `!stay` after it leaves no moment in which the agent still hears."""
    agent.print_result(step.text(0) if step.args else "ok")


def _background(agent: Agent, step: Step) -> None:
    agent.add_background(step.number(0))


def _retry(agent: Agent, step: Step) -> None:
    """A model request that fails N times; what the first try had streamed is void."""
    attempts = step.count(0)
    segment = agent.next_id("s")
    for token in ("this ", "will ", "be ", "void "):
        agent.emit({"type": "delta", "segment": segment, "text": token})
    for attempt in range(1, attempts + 1):
        line: dict[str, object] = {"type": "model", "state": "retrying", "attempt": attempt}
        agent.emit(line | {"attempts_max": attempts, "delay_ms": RETRY_DELAY_MS, "error": "overloaded"})
        if attempt == 1:
            agent.emit({"type": "discard", "segment": segment})
        agent.wait(RETRY_DELAY_MS / 1000)
    if attempts == 0:
        agent.emit({"type": "discard", "segment": segment})


def _fail(agent: Agent, step: Step) -> None:
    code = step.text(0)
    message = f"the model failed with {code}"
    agent.emit({"type": "model", "state": "failed", "code": code, "message": message})
    agent.print_result("error", {"code": code, "message": message})
    raise TurnOver


def _forget(agent: Agent, step: Step) -> None:
    agent.session.forget(soft=bool(step.args) and step.text(0) == "soft")


# --- misbehaviour -------------------------------------------------------------------------------------------------


def _garbage(agent: Agent, step: Step) -> None:
    kind, _, size = step.text(0).partition("=")
    if kind == "no_newline":
        faults.print_without_newline(agent)
    else:
        line = faults.garbage_line(kind, int(size or faults.HUGE_MIB))
        agent.channel.emit_raw(line, {"garbage": kind, "bytes": len(line)})
    agent.handle()


def _stderr(agent: Agent, step: Step) -> None:
    for number in range(1, step.count(0) + 1):
        agent.channel.complain(f"stderr line {number:06d} {'.' * 80}")
        agent.handle()


def _exit(agent: Agent, step: Step) -> None:
    raise Exiting(step.count(0))


def _crash(agent: Agent, step: Step) -> None:
    number = getattr(signal, step.text(0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    agent.channel.confirm()
    agent.truth.record("crash", {"signal": step.text(0)})
    os.kill(os.getpid(), number)


def _ignore(agent: Agent, step: Step) -> None:
    name = step.text(0)
    agent.ignored_signals.add(name)
    if name not in ("SIGTERM", "SIGHUP", "SIGINT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def _fork2(agent: Agent, step: Step) -> None:
    faults.spawn_stray(agent, step.number(0, faults.STRAY_LIFE_S), is_orphan=True)


def _child(agent: Agent, step: Step) -> None:
    faults.spawn_stray(agent, step.number(0, faults.STRAY_LIFE_S), is_orphan=False)


def _close_stdout(agent: Agent, _step: Step) -> None:
    agent.channel.close_stdout()


_PERFORMERS: dict[str, Callable[[Agent, Step], None]] = {
    "say": _say,
    "reasoning": _reasoning,
    "deltas": _deltas,
    "lines": _lines,
    "flood": _flood,
    "friendly": _friendly,
    "env": _env,
    "recall": _recall,
    "tool": _tool,
    "ask": _ask,
    "question": _question,
    "steer": _steer,
    "sleep": _sleep,
    "hang": _hang,
    "stay": _stay,
    "wait_file": _wait_file,
    "touch": _touch,
    "usage": _usage,
    "result": _result,
    "background": _background,
    "retry": _retry,
    "fail": _fail,
    "forget": _forget,
    "garbage": _garbage,
    "stderr": _stderr,
    "exit": _exit,
    "crash": _crash,
    "ignore": _ignore,
    "fork2": _fork2,
    "child": _child,
    "close_stdout": _close_stdout,
}

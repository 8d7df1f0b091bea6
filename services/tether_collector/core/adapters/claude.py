"""Claude Code (`claude -p`, stream-json over stdin and stdout), pinned to 2.1.332; 2.1.197 is understood as well.

This module speaks to the CLI: command line, environment, stdin. What it says is read in `claude_lines.py`.

* `system/init` comes with the first prompt and again with every turn. It is no proof that a resume will work: the
  session counts as resumable after its first completed item.
* Prompts carry a uuid, so that `command_lifecycle` (2.1.332) shows what became of each; 2.1.197 says nothing of the
  kind, and a turn is given to the oldest prompt that waits. A uuid is used once, ever: the CLI drops a repeated one.
* An approval or a question (`can_use_tool`) is answered by its `request_id`; an allow repeats the whole input.
* An interrupt is acknowledged by `control_response`; the turn's `result` follows.
* The history of a lost session is the first part of the prompt; where the CLI's own file of it is found again, it is
  resumed under a name of its own instead, and no history is given.
* Keys reach the CLI through a descriptor where it can (`secret_descriptors`), else through its environment, which the
  provider fills; nothing of them is here. In the environment every command that the model runs would inherit them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tether.errors import InvalidError
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import claude_lines
from tether_collector.core.adapters import questions as q
from tether_collector.core.inputs import OutputLine

OPENING: Final = "opening:prompt"
DENIED: Final = "The user declined."
_NAMESPACE: Final = uuid.UUID("6f1d1c5e-8f5a-4b0e-9a59-6c2f0f3a7b11")
_ENVIRONMENT: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_EAGER_FLUSH": "1",  # the prompt's row is durable before init: a resume finds the session
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
}


class Claude:
    """See the module."""

    name = "claude"
    version = "1"
    can_interject = True
    secret_descriptors: Mapping[str, str] = {
        "ANTHROPIC_API_KEY": "CLAUDE_CODE_API_KEY_FILE_DESCRIPTOR",
        "CLAUDE_CODE_OAUTH_TOKEN": "CLAUDE_CODE_OAUTH_TOKEN_FILE_DESCRIPTOR",
    }

    def argv(self, launch: b.Launch, binary: Sequence[str]) -> list[str]:
        argv = [*binary, "-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"]
        argv += ["--include-partial-messages", "--permission-prompt-tool", "stdio"]
        argv += ["--resume" if launch.resume else "--session-id", launch.session]
        if launch.permission_mode is not None:
            argv += ["--permission-mode", launch.permission_mode]
        if launch.model is not None:
            argv += ["--model", launch.model]
        return [*argv, *launch.args]

    def environment(self, launch: b.Launch) -> dict[str, str]:
        return {**_ENVIRONMENT, "CLAUDE_CONFIG_DIR": b.config_home(launch, self.name)}

    def initial(self, launch: b.Launch) -> dict[str, Any]:
        return claude_lines.initial(launch.prompt_id, launch.key_source)

    def opening(self, launch: b.Launch) -> Sequence[tuple[str, bytes]]:
        return [(OPENING, _user(launch.prompt_id, b.opening_content(launch)))]

    def prompt(self, state: dict[str, Any], control: str, content: Sequence[Mapping[str, Any]]) -> bytes:
        prompt_uuid = str(uuid.uuid5(_NAMESPACE, control))
        state["prompts"][prompt_uuid] = control
        state["waiting"].append(control)
        return _user(prompt_uuid, content)

    def answer(self, state: dict[str, Any], answer: b.Answer) -> bytes:
        ask = state["asks"].get(answer.interaction)
        if ask is None:
            raise InvalidError("payload.interaction", "is not open")
        response: dict[str, Any]
        if answer.decision == "deny":
            response = {"behavior": "deny", "message": answer.text or DENIED}
        elif ask["questions"] is None:
            if answer.answers:
                raise InvalidError("payload.answers", "an approval takes none")
            response = {"behavior": "allow", "updatedInput": ask["input"] if answer.input is None else answer.input}
        else:
            if answer.input is not None:
                raise InvalidError("payload.input", "only an approval takes a changed input")
            given = {"answers": _answers(ask["questions"], answer)}
            response = {"behavior": "allow", "updatedInput": {**ask["input"], **given}}
        reply = {"subtype": "success", "request_id": ask["request"], "response": response}
        return _line({"type": "control_response", "response": reply})

    def interrupt(self, state: dict[str, Any], control: str) -> bytes:
        return _line({"type": "control_request", "request_id": control, "request": {"subtype": "interrupt"}})

    def on_line(self, state: dict[str, Any], line: OutputLine) -> b.Reading:
        if line.stream == "stderr":
            return claude_lines.read_stderr(state, line)
        message = lines.parse(line)
        if isinstance(message, str):
            return b.Reading((lines.raw(line, message),))
        reading = claude_lines.read(state, message)
        return b.Reading((lines.raw(line, reading),)) if isinstance(reading, str) else reading

    def on_exit(self, state: dict[str, Any], rc: int) -> b.Reading:
        return claude_lines.close_all(state)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _user(prompt_uuid: str, content: Sequence[Mapping[str, Any]]) -> bytes:
    parts = [dict(part) for part in content]
    return _line({"type": "user", "uuid": prompt_uuid, "message": {"role": "user", "content": parts}})


def _answers(questions: list[dict[str, Any]], answer: b.Answer) -> dict[str, str]:
    """Question text → chosen labels or free text, as the CLI wants it."""
    chosen = q.chosen(questions, answer)
    return {question["question"]: ", ".join(chosen[question["id"]]) for question in questions}


CLAUDE: Final = Claude()

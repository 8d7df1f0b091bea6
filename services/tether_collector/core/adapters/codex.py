"""Codex (`codex app-server`, JSON-RPC over stdin and stdout), pinned to 0.171.0; the native binary, never its wrapper.

    initialize ──▶ initialized, thread/start or thread/resume ──▶ turn/start(prompt) ──▶ turn/completed
                                     └─▶ thread/inject_items ──────▲   (the history of a session that is lost)

This module speaks to the CLI: command line, environment, stdin. What it says is read in `codex_lines.py`, what it asks
in `codex_asks.py`. Our requests have ids that say what they are: `opening:initialize`, `reply:thread`, `reply:turn`,
`reply:history`, a control's own id, `deny:…`, `clean:…`.

* A prompt is a `turn/start` with its control as `clientUserMessageId`, which the CLI echoes in the item of the prompt.
  While a turn runs it is steered into it: the model's reply is cut there, and made anew with the prompt in it. One that
  comes before the thread is known waits for it.
* An interrupt is a `turn/interrupt`. It leaves a running command alone, so once the turn has ended
  `thread/backgroundTerminals/clean` ends what is left.
* The protocol takes no text with a denial and no changed command: a text is steered into the turn behind the denial, a
  changed input is refused.
* The key of the model server reaches the CLI through a descriptor that a command of the provider's configuration reads,
  once. It is asked for again only where the model server refused the key, and then says so: see `REFUSED`. In the
  environment the key would be in `shell_snapshots` below `CODEX_HOME`, and `account/login` would write it to a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tether.errors import InvalidError
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import codex_asks, codex_lines
from tether_collector.core.adapters.codex_wire import INITIALIZE, RPC, prompt_input
from tether_collector.core.adapters.jsonrpc import Notification, Request, Response, classify
from tether_collector.core.history import response_items
from tether_collector.core.inputs import OutputLine

# permission mode → approvalPolicy, sandbox
MODES: Final[Mapping[str, tuple[str, str]]] = {
    "default": ("untrusted", "workspace-write"),
    "acceptEdits": ("on-request", "workspace-write"),
    "plan": ("never", "read-only"),
    "dontAsk": ("never", "workspace-write"),
    "bypassPermissions": ("never", "danger-full-access"),
}
PROVIDER: Final = "tether"
OPENAI_URL: Final = "https://api.openai.com/v1"
_KEY_FD: Final = "TETHER_OPENAI_KEY_FD"
_CODEX_KEY_FD: Final = "TETHER_CODEX_KEY_FD"
_READ_KEY: Final = (
    f'IFS= read -r key < "/proc/self/fd/${{{_CODEX_KEY_FD}:-${_KEY_FD}}}"; '
    f'if [ -n "$key" ]; then printf %s "$key"; else echo "{codex_lines.REFUSED}" >&2; exit 1; fi'
)
_SETTINGS: Final = (
    "check_for_update_on_startup=false",
    "analytics.enabled=false",
    'cli_auth_credentials_store="ephemeral"',  # a login, whoever makes one, is never written to the workspace
    "features.default_mode_request_user_input=true",  # the model may ask questions
    "suppress_unstable_features_warning=true",
)


class Codex:
    """See the module."""

    name = "codex"
    version = "1"
    can_interject = True
    secret_descriptors: Mapping[str, str] = {"OPENAI_API_KEY": _KEY_FD, "CODEX_API_KEY": _CODEX_KEY_FD}

    def argv(self, launch: b.Launch, binary: Sequence[str]) -> list[str]:
        """Raises `InvalidError` for an unknown permission mode."""
        if launch.permission_mode is not None and launch.permission_mode not in MODES:
            raise InvalidError("agent.permission_mode", f"must be one of {', '.join(MODES)}")
        return [*binary, "app-server", *_configured(_SETTINGS), *launch.args]

    def environment(self, launch: b.Launch) -> dict[str, str]:
        return {"CODEX_HOME": b.config_home(launch, self.name), "NO_COLOR": "1"}

    def environment_arguments(self, variables: Mapping[str, str]) -> list[str]:
        """A provider for the key and the address that the environment names: the CLI's own takes neither from there."""
        has_key = any(name in variables for name in self.secret_descriptors)
        url = variables.get("OPENAI_BASE_URL")
        if not has_key and not url:
            return []
        name = "OpenAI" if not url else "OPENAI_BASE_URL"
        settings = [f"model_provider={_toml(PROVIDER)}", f"model_providers.{PROVIDER}.name={_toml(name)}"]
        settings.append(f"model_providers.{PROVIDER}.base_url={_toml(url or OPENAI_URL)}")
        settings.append(f'model_providers.{PROVIDER}.wire_api="responses"')
        if has_key:
            read = f'{{command="/bin/sh",args=["-c",{_toml(_READ_KEY)}],refresh_interval_ms=0}}'
            settings.append(f"model_providers.{PROVIDER}.auth={read}")
        return _configured(settings)

    def initial(self, launch: b.Launch) -> dict[str, Any]:
        policy, sandbox = MODES.get(launch.permission_mode or "default", MODES["default"])
        thread: dict[str, Any] = {"cwd": launch.cwd, "approvalPolicy": policy, "sandbox": sandbox}
        if launch.model is not None:
            thread["model"] = launch.model
        if launch.resume:
            thread.update(threadId=launch.session, excludeTurns=True)
        state = codex_lines.initial(launch.prompt_id, prompt_input(launch.content), thread, launch.key_source)
        if launch.history is not None:
            state["inject"] = response_items(launch.history["rows"], partial=launch.history["partial"])
        return state

    def opening(self, launch: b.Launch) -> Sequence[tuple[str, bytes]]:
        client = {"name": "tether", "title": "Tether", "version": self.version}
        params = {"clientInfo": client, "capabilities": {"experimentalApi": True}}
        return [(INITIALIZE, RPC.request(INITIALIZE, "initialize", params))]

    def prompt(self, state: dict[str, Any], control: str, content: Sequence[Mapping[str, Any]]) -> bytes | None:
        given = prompt_input(content)
        if state["opening"] is not None:  # the first prompt's turn is not asked for yet
            state["later"].append([control, given])
            return None
        return codex_lines.turn_start(state, control, control, given)

    def answer(self, state: dict[str, Any], answer: b.Answer) -> bytes:
        return codex_asks.answer(state, answer)

    def interrupt(self, state: dict[str, Any], control: str) -> bytes | None:
        if state["turn"] is None and (state["opening"] is not None or state["waiting"]):
            state["interrupts"].append(control)  # a turn is about to begin
            return None
        return codex_lines.turn_interrupt(state, control)

    def on_line(self, state: dict[str, Any], line: OutputLine) -> b.Reading:
        if line.stream == "stderr":
            return b.Reading((lines.raw(line, "stderr"),))
        parsed = lines.parse(line)
        message = parsed if isinstance(parsed, str) else classify(parsed)
        match message:
            case Notification():
                reading = codex_lines.notified(state, message)
            case Request():
                asked = codex_asks.asked(state, message)
                if isinstance(asked, codex_asks.Refused):
                    return b.Reading((lines.raw(line, asked.why),), (asked.reply,))
                reading = asked
            case Response():
                reading = codex_lines.answered(state, message)
            case why:
                reading = why
        return b.Reading((lines.raw(line, reading),)) if isinstance(reading, str) else reading

    def on_exit(self, state: dict[str, Any], rc: int) -> b.Reading:
        return codex_lines.close_all(state)


def _configured(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("-c", setting)]


def _toml(text: str) -> str:
    """A string as TOML's basic string, which JSON's is."""
    return json.dumps(text, ensure_ascii=False)


CODEX: Final = Codex()

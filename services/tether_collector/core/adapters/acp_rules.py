"""How agents that speak ACP differ: one `Profile` each, nothing but data. What is not in a profile is in the protocol.

Adding an agent that speaks ACP is one entry in `PROFILES` and one golden folder. One without an entry runs with
`GENERAL`: the protocol as it is written, prompts one at a time, in whatever mode the agent starts in.

Measured with the versions that `docs/agents.md` names; `claude`, `codex` and `opencode` from recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

PREFIX: Final = "acp:"
INTERNAL_ERROR: Final = -32603
RESOURCE_NOT_FOUND: Final = -32002
MODEL_AUTH: Final = "model_auth"
MODEL_ERROR: Final = "model_error"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error of session/load or session/resume. `text` stands in the message or anywhere in `data`, in any case."""

    code: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """One agent. `{home}` in a value of `env` is its folder below `.tether/agents` in the workspace."""

    # After the command of the agents file or the pin.
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    # Tether's permission mode → further variables; "" is that of a prompt without one.
    env_by_mode: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Tether's permission mode → the agent's; "" as above. A mode without an entry is tried under its own name.
    modes: Mapping[str, str] = field(default_factory=dict)
    # The model's questions come as elicitation/create where the client says that it has forms.
    has_forms: bool = True
    # A form's property "<key><suffix>" is the free text that belongs to the choice "<key>".
    free_text_suffix: str = ""
    # Answers of questions that come as session/request_permission stand beside the outcome, by their place.
    answers_beside_outcome: bool = False
    # False: a second session/prompt breaks the first, or is never answered. It is held until the first is answered.
    takes_prompts_while_running: bool = False
    # False: its sessions are not reliably found again, so none is told to be resumable.
    resumes: bool = True
    not_found: Sequence[Refusal] = (Refusal(RESOURCE_NOT_FOUND),)
    busy: Sequence[Refusal] = ()
    # `data.errorName` of a failed prompt → what it was, where no HTTP status says so.
    error_names: Mapping[str, str] = field(default_factory=dict)
    # Members of an update's `_meta`, as a path, whose value means that the turn's model request has failed, though the
    # turn ends with end_turn.
    failed_meta: tuple[tuple[str, ...], str] | None = None
    # Members of an update's `_meta` that list what the agent waits for, and the word for "an approval".
    waiting_meta: tuple[tuple[str, ...], str] | None = None
    # How lines of stderr begin that say how the agent itself fares, at every start: they are no events.
    chatter: tuple[str, ...] = ()
    # A command that was cancelled says so in its output alone, as if it had ended well.
    aborted_text: str | None = None
    # A cancelled turn leaves its commands running: the session is closed as well, which ends them.
    close_after_cancel: bool = False


_NO_TELEMETRY: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
}
_OPENCODE_ASKS: Final = '{"edit":"ask","bash":"ask","webfetch":"ask"}'
_OPENCODE_ALLOWS: Final = '{"edit":"allow","bash":"allow","webfetch":"allow","external_directory":"allow"}'

GENERAL: Final = Profile()

PROFILES: Final[dict[str, Profile]] = {
    # @agentclientprotocol/claude-agent-acp 0.101.0
    "claude": Profile(
        env={**_NO_TELEMETRY, "CLAUDE_CODE_EAGER_FLUSH": "1", "CLAUDE_CONFIG_DIR": "{home}"},
        modes={"": "default"},  # it starts in `auto`, where the model judges
        chatter=("[session/", "[idle-compaction]"),
        free_text_suffix="_custom",
        takes_prompts_while_running=True,
    ),
    # @agentclientprotocol/codex-acp 2.6.0
    "codex": Profile(
        env={"CODEX_HOME": "{home}", "NO_BROWSER": "1"},
        modes={
            "": "read-only",
            "default": "read-only",
            "acceptEdits": "workspace-write",
            "bypassPermissions": "agent-full-access",
        },
        takes_prompts_while_running=True,
        not_found=(Refusal(RESOURCE_NOT_FOUND), Refusal(INTERNAL_ERROR, "no rollout found")),
        busy=(Refusal(-32600, "in use by another"),),
        failed_meta=(("codex", "threadStatus", "type"), "systemError"),
        waiting_meta=(("codex", "threadStatus", "activeFlags"), "waitingOnApproval"),
        close_after_cancel=True,
    ),
    # @zed-industries/codex-acp 0.16.0, the older adapter, written in Rust
    "codex-zed": Profile(
        env={"CODEX_HOME": "{home}", "NO_BROWSER": "1"},
        modes={"": "read-only", "default": "read-only", "acceptEdits": "auto", "bypassPermissions": "full-access"},
        has_forms=False,
    ),
    # opencode-ai 1.18.33
    "opencode": Profile(
        arguments=("acp",),
        env={
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_CLAUDE_CODE": "1",  # what a person keeps in ~/.claude is not the sandbox's
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            "XDG_CACHE_HOME": "{home}/cache",
            "XDG_CONFIG_HOME": "{home}/config",
            "XDG_DATA_HOME": "{home}/data",
            "XDG_STATE_HOME": "{home}/state",
        },
        env_by_mode={
            "": {"OPENCODE_PERMISSION": _OPENCODE_ASKS},
            "default": {"OPENCODE_PERMISSION": _OPENCODE_ASKS},
            "acceptEdits": {"OPENCODE_PERMISSION": '{"edit":"allow","bash":"ask","webfetch":"ask"}'},
            "plan": {"OPENCODE_PERMISSION": _OPENCODE_ASKS},
            "dontAsk": {"OPENCODE_PERMISSION": '{"edit":"deny","bash":"deny","webfetch":"deny"}'},
            "bypassPermissions": {"OPENCODE_PERMISSION": _OPENCODE_ALLOWS},
        },
        modes={
            "": "build",
            "default": "build",
            "acceptEdits": "build",
            "dontAsk": "build",
            "bypassPermissions": "build",
        },
        has_forms=False,
        # It queues a second prompt, but a cancel then may drop that one unread and let the first run on.
        takes_prompts_while_running=False,
        error_names={"APIError": MODEL_ERROR, "ProviderAuthError": MODEL_AUTH},
        aborted_text="User aborted the command",
        not_found=(
            Refusal(RESOURCE_NOT_FOUND),
            Refusal(INTERNAL_ERROR, '"service": "session"'),
            Refusal(-32602, "session not found"),
        ),
    ),
    # @qwen-code/qwen-code 0.24.4
    "qwen": Profile(
        arguments=("--acp",),
        env={"QWEN_HOME": "{home}"},
        modes={"": "default", "acceptEdits": "auto-edit", "bypassPermissions": "yolo"},
        has_forms=False,
        answers_beside_outcome=True,
    ),
    # @google/gemini-cli 0.61.0: most of its sessions are not found again
    "gemini": Profile(
        arguments=("--acp",),
        env={"GEMINI_CLI_HOME": "{home}"},
        modes={"": "default", "acceptEdits": "autoEdit", "bypassPermissions": "yolo"},
        has_forms=False,
        resumes=False,
        not_found=(Refusal(RESOURCE_NOT_FOUND), Refusal(INTERNAL_ERROR, "Invalid session identifier")),
    ),
}


def profile_of(kind: str) -> Profile:
    """Of `acp:<name>`."""
    return PROFILES.get(kind.removeprefix(PREFIX), GENERAL)


def member_of(value: Any, path: Sequence[str]) -> Any:
    """What stands at a path of an object, None where there is nothing."""
    for name in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value

"""What an agent's adapter is: the pure translation between one CLI's lines and Tether's events.

    line in  → `Drafts` and `Signal`s out          (`on_line`, `on_exit`); a `Reply` is a signal with bytes for stdin
    intent   → bytes for stdin                     (`opening`, `prompt`, `answer`, `interrupt`)

Each write to stdin has an id that the keeper takes once: a control's own id, or one of the adapter's, which has a colon
in it (`opening:prompt`, `reply:3`) and so can be no control's.

An adapter's state is a plain JSON-able object owned by it; the execution machine (`core/execution.py`) keeps it,
dumps it at segment boundaries and decides about ends, controls and receipts. No clock, no I/O, no randomness:
ids come from the lines, from the launch or from the control. Adding an agent is one file here and one golden folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from tether_collector.core.history import digest_text
from tether_collector.core.inputs import Draft, OutputLine


@dataclass(frozen=True, slots=True)
class Launch:
    """What an execution starts with. `content` is the user's prompt; `session` the native session to make or resume.

    `prompt_id` is a uuid derived from the execution (the same on every replay). `key_source` is for people.
    `fallback`: where the session to resume does not exist, the conversation's history may stand in for it. `history`:
    it does: {"rows": `tether.history.HistoryRow`s as JSON, oldest first, "partial"}; the session is a new one then.
    """

    execution: str
    prompt_id: str
    content: Sequence[Mapping[str, Any]]
    cwd: str
    session: str
    resume: bool = False
    model: str | None = None
    permission_mode: str | None = None
    args: Sequence[str] = ()
    key_source: str | None = None
    fallback: bool = False
    history: Mapping[str, Any] | None = None


def opening_content(launch: Launch) -> list[dict[str, Any]]:
    """The user's prompt, behind the history where there is one: for a CLI that takes that in a prompt only."""
    content = [dict(part) for part in launch.content]
    if launch.history is None:
        return content
    text = digest_text(launch.history["rows"], partial=launch.history["partial"])
    return [{"type": "text", "text": text}, *content]


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The CLI said the terminal line of a turn."""

    outcome: Literal["completed", "failed", "interrupted"]
    code: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class TurnBegan:
    """The CLI took up a prompt (or began a turn by itself, after background work)."""

    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class PromptSeen:
    """Proof in the CLI's own output that this prompt (its control id or prompt id) was taken up or queued."""

    prompt: str


@dataclass(frozen=True, slots=True)
class PromptTaken:
    """This prompt waits no longer: it joined the running turn, or was dropped; no turn of its own is owed to it."""

    prompt: str


@dataclass(frozen=True, slots=True)
class PromptRefused:
    """The CLI refused this interjection: the model has not seen it, and never will."""

    prompt: str
    detail: str


@dataclass(frozen=True, slots=True)
class InterruptSeen:
    """Proof in the CLI's own output that the interrupt with this control id was taken."""

    control: str


@dataclass(frozen=True, slots=True)
class AnswerSeen:
    """The interaction's outcome showed in the CLI's output (its tool went on, was refused, or was withdrawn).

    `only_if_written`: it shows an answer that was written to the CLI, and says nothing where none was."""

    interaction: str
    outcome: Literal["answered", "denied", "cancelled"]
    only_if_written: bool = False


def answered_or_withdrawn(interaction: str) -> tuple[AnswerSeen, AnswerSeen]:
    """The CLI waits no longer: an answer that was written is the reason; where none was, it went on by itself."""
    return AnswerSeen(interaction, "answered", only_if_written=True), AnswerSeen(interaction, "cancelled")


@dataclass(frozen=True, slots=True)
class BackgroundChanged:
    """How much background work is open now, and how many turns the CLI probably begins by itself because of some that
    ended (`owed`: waited for a moment, not for ever)."""

    open: int
    owed: int = 0


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """The CLI refused the session: it does not exist, or has another writer; or it was taken, and nothing of it is
    there (`not_resumed`; that the CLI began another session is seen without this)."""

    reason: Literal["not_found", "not_resumed", "busy"]
    detail: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Bytes for stdin that a line calls for: the next step of a handshake, the answer to a request of the CLI's own, or
    a prompt or interrupt that had to wait for one of these.

    `control`: the id of the control that is delivered by it, else an id with a colon, unique within the execution and
    the same on every replay. `work`: it makes the CLI begin something, so it is not written once a stop was accepted.
    """

    control: str
    data: bytes
    work: bool = False


Signal = (
    TurnEnded
    | TurnBegan
    | PromptSeen
    | PromptTaken
    | PromptRefused
    | InterruptSeen
    | AnswerSeen
    | BackgroundChanged
    | SessionFailed
    | Reply
)


class Reading(NamedTuple):
    """What one line says: events in order, then signals in order. Proofs (`PromptSeen`, `InterruptSeen`, `AnswerSeen`)
    count as having happened before the line's events."""

    drafts: Sequence[Draft] = ()
    signals: Sequence[Signal] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A user's answer to an interaction. `input`: the changed tool input of an approval; `answers`: question id or
    text → chosen labels or free text."""

    interaction: str
    decision: Literal["allow", "deny"]
    text: str | None = None
    input: Mapping[str, Any] | None = None
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)


def config_home(launch: Launch, agent: str) -> str:
    """Where the CLI keeps its sessions: on the workspace volume, so that they come back with it. The folder is there
    when the CLI starts."""
    return f"{launch.cwd}/.tether/agents/{agent.replace(':', '-')}"


def refused_key(key_source: str | None) -> str:
    """What a refused key's owner has to know: which one it was, never what it is."""
    return f"the model server refused the credentials ({key_source or 'no key is configured'})"


class Adapter(Protocol):
    """One CLI. Instances are stateless; `state` is the dict made by `initial`, changed in place by the calls."""

    name: str
    version: str  # recorded in the spool; a change of meaning changes it
    can_interject: bool
    # Variable with a key → the variable by which this CLI takes a descriptor to read the same key from, once. Such a
    # key stands in no environment: neither the CLI's tools nor /proc show it.
    secret_descriptors: Mapping[str, str]

    def argv(self, launch: Launch, binary: Sequence[str]) -> list[str]:
        """The command line. Never holds a secret or the prompt. May raise `InvalidError` for a setting of the launch
        that this CLI does not have: nothing is started then."""
        ...

    def environment(self, launch: Launch) -> dict[str, str]:
        """Fixed variables that this CLI needs (telemetry off, flush, its session files' place); user's keys come from
        the provider."""
        ...

    def initial(self, launch: Launch) -> dict[str, Any]: ...

    def on_line(self, state: dict[str, Any], line: OutputLine) -> Reading:
        """Never raises: what is not understood becomes a bounded `raw` event."""
        ...

    def on_exit(self, state: dict[str, Any], rc: int) -> Reading:
        """Close what is open (running tools, streaming text) when the process is gone."""
        ...

    def opening(self, launch: Launch) -> Sequence[tuple[str, bytes]]:
        """(id with a colon, stdin bytes) written right after the spawn: the prompt, or what a handshake begins with."""
        ...

    def prompt(self, state: dict[str, Any], control: str, content: Sequence[Mapping[str, Any]]) -> bytes | None:
        """An interjection. May note the control in `state`, to recognise it in the CLI's output. None: it cannot be
        written yet; a `Reply` under this id follows when it can."""
        ...

    def answer(self, state: dict[str, Any], answer: Answer) -> bytes:
        """Changes nothing. Raises `InvalidError` for an answer that the interaction cannot take."""
        ...

    def interrupt(self, state: dict[str, Any], control: str) -> bytes | None:
        """None: not yet; a `Reply` under this id follows. Everything that the CLI must be told at once is in the bytes
        (several lines where open requests of its own are to be answered, too)."""
        ...


@runtime_checkable
class ReadsEnvironment(Protocol):
    """An adapter whose CLI takes from its command line what users name in variables: an address, the kind of a key."""

    def environment_arguments(self, variables: Mapping[str, str]) -> list[str]:
        """Arguments that go before those of the launch. `variables`: of the CLI's environment, a secret's value empty
        where it goes through a descriptor."""
        ...


@runtime_checkable
class Migrates(Protocol):
    """An adapter whose `state` has another shape than in an earlier version of it. One that only says other things of
    the same lines needs no migration."""

    def migrate(self, state: dict[str, Any], from_version: str) -> dict[str, Any]:
        """The state as this version would have it. Takes the state of any version, never raises."""
        ...


def migrated(adapter: Adapter, state: dict[str, Any], from_version: str) -> dict[str, Any]:
    """A saved adapter's state for the present version."""
    if from_version == adapter.version or not isinstance(adapter, Migrates):
        return state
    return adapter.migrate(state, from_version)

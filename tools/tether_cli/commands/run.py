"""`tether run`: a prompt in, the response on the terminal.

Without a set that is up it starts one for as long as it lives, and says so. stdout carries the agent's words, stderr
everything else; with `--json` stdout carries one item per line and the result last.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_args

import typer

from tether_cli.options import AgentsDirOption, DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output
from tether_cli.state import data_option

if TYPE_CHECKING:
    from tether.client import Client
    from tether.prompt import AgentSpec, Continuation, Mode, ResumeChoice
    from tether_cli.live import Live
    from tether_cli.state import SetState

_ASSIGN_S: Final = 5.0
_AGENT: Final = "claude"
_POLICIES: Final = ("ask", "deny", "all")
# What to do about an error that the agent's side told.
_HINTS: Final = {
    "CAPABILITY_MISSING": "`tether doctor` says what is missing; a set looks for agents when it starts",
    "SESSION_BUSY": "wait for the response, or stop what runs with `--mode takeover`",
    "STOP_UNCONFIRMED": "the same command with `--mode takeover` tries once more; `tether ps` says what runs",
    "REQUEST_SUPERSEDED": "`tether attach CONVERSATION` follows what took its place",
}
_PROMPT_MODES: Final = ("auto", "interject", "takeover")
_MODES: Final = ("default", "acceptEdits", "plan", "dontAsk", "bypassPermissions")


def register(app: typer.Typer) -> None:
    app.command("run")(run)


def run(
    prompt: Annotated[str, typer.Argument(help="What to do; `-` reads it from stdin.")],
    agent: Annotated[
        str | None, typer.Option(help="Which agent answers, by its name in `tether agents list`.  [default: claude]")
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory to work in.  [default: one of the conversation's own]")
    ] = None,
    approve: Annotated[str, typer.Option(help="Approvals: ask (on the terminal), deny or all.")] = "ask",
    conversation: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on in this conversation.  [default: a new one]")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="Where something runs already: auto or interject (say it there), takeover (stop that).")
    ] = "auto",
    resume: Annotated[
        str | None,
        typer.Option(
            help="Where the agent's session could not be resumed: fresh (a new one), or history (a new one that is "
            "given the conversation's history)."
        ),
    ] = None,
    continuation: Annotated[
        str | None,
        typer.Option(help="A turn that a drain cuts: continue (it goes on by itself), or wait.  [default: wait]"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The agent's model.")] = None,
    permission_mode: Annotated[str | None, typer.Option(help=f"The agent's own: {', '.join(_MODES)}.")] = None,
    agents_dir: AgentsDirOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a prompt and follow the response. The first Ctrl-C interrupts it, the second detaches."""
    from tether.ids import new_id
    from tether.prompt import Continuation, ResumeChoice
    from tether_cli import talk

    _known("--approve", approve, _POLICIES)
    _known("--mode", mode, _PROMPT_MODES)
    _known("--permission-mode", permission_mode, _MODES)
    _known("--resume", resume, get_args(ResumeChoice))
    _known("--continuation", continuation, get_args(Continuation))
    from_stdin = prompt == "-"
    text = sys.stdin.read() if from_stdin else prompt
    if not text.strip():
        raise CliError("the prompt is empty", exit_code=Exit.USAGE)
    wanted = _Wanted(
        text=text,
        spec=_spec(agent, model, permission_mode),
        conversation=talk.token(conversation, "--conversation") if conversation is not None else new_id("conv"),
        approve=approve,
        mode=cast("Mode", mode),
        resume=cast("ResumeChoice | None", resume),
        continuation=cast("Continuation | None", continuation),
        from_stdin=from_stdin,
    )
    directory = None if workspace is None else _directory(workspace)
    # A message into a conversation may be for an agent that runs there: only one that is named is looked for first.
    look = agent is not None or conversation is None
    raise typer.Exit(int(talk.run(_run(wanted, directory, data, agents_dir, Output(as_json), look))))


def _known(option: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise CliError(f"{option} must be one of {', '.join(known)}", exit_code=Exit.USAGE)


def _spec(agent: str | None, model: str | None, permission_mode: str | None) -> AgentSpec:
    from tether.prompt import AgentSpec

    try:
        return AgentSpec.model_validate({"kind": agent or _AGENT, "model": model, "permission_mode": permission_mode})
    except ValueError:
        why = f"--agent {agent!r} is no agent's name"
        raise CliError(why, remedy="see `tether agents list`", exit_code=Exit.USAGE) from None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What was typed. `resume`: of the next submission; `workspace` is set where a directory was named."""

    text: str
    spec: AgentSpec
    conversation: str
    approve: str
    mode: Mode
    resume: ResumeChoice | None
    continuation: Continuation | None
    from_stdin: bool
    workspace: str | None = None


async def _run(
    wanted: _Wanted, directory: Path | None, data: Path | None, agents_dir: Path | None, output: Output, look: bool
) -> Exit:
    from tether_cli import talk
    from tether_cli.set import running_or_ephemeral

    async with running_or_ephemeral(data, agents_dir=agents_dir) as state:
        if state.ephemeral:
            output.note("no set is up: one was started for this command and ends with it (`tether up` keeps one)")
        if look:
            _check_agent(state, wanted.spec.kind, output)
        if directory is not None:
            wanted = replace(wanted, workspace=await _assign(state, directory))
        async with talk.http_client(state) as client:
            while True:
                code, choice = await _follow(client, state, wanted, output)
                if choice is None:
                    return code
                wanted = replace(wanted, resume=choice, mode="auto")


def _check_agent(state: SetState, kind: str, output: Output) -> None:
    """Before anything is sent: that the set can run this agent (raises CliError), and a warning where it has no key."""
    from tether_cli import agents_config

    if state.agents is None:
        return
    if kind not in state.agents:
        raise CliError(
            f"--agent {kind}: the set has none of this name; it has {', '.join(state.agents)}",
            remedy="`tether agents list` says where each is or why not; a set looks for agents when it starts",
            exit_code=Exit.USAGE,
        )
    if not state.agents[kind] and kind in agents_config.KEYS:
        remedy = f"{agents_config.key_remedy(kind)}; keys are read when it starts"
        output.warn(f"{kind} has no key and may be refused by its model", remedy)


async def _follow(client: Client, state: SetState, wanted: _Wanted, output: Output) -> tuple[Exit, ResumeChoice | None]:
    """One submission to its end: the exit code, and with what it is to be sent again where somebody chose that."""
    from tether.client.tracking import ResponseTracker
    from tether_cli import resuming
    from tether_cli.live import Live, exit_code
    from tether_cli.render import Renderer
    from tether_cli.terminal import Keyboard, Screen

    conversation = wanted.conversation
    submission = await client.prompt(
        conversation,
        wanted.text,
        agent=wanted.spec,
        workspace=wanted.workspace,
        mode=wanted.mode,
        resume=wanted.resume,
        continuation=wanted.continuation,
    )
    if submission.status == "pending":
        output.note("it is stored and waits for its turn; this goes on waiting for it")
    tracker = ResponseTracker(submission.request_id, submission.response_id, submission.execution)
    if submission.status == "interjected" and submission.execution is not None:
        joined = await client.state(submission.execution)
        tracker.begin_from(joined)
        output.note(f"an execution runs there ({submission.execution}): this was said into it")
        for waiting in joined.pending():
            line = shlex.join(["tether", "answer", conversation, waiting.id]) + data_option(state.data)
            output.note(f"it waits for an answer: {line} allow|deny")
    if output.as_json:
        output.value({"kind": "submission", "conversation": conversation, **_ids(submission)})
    terminal = sys.stdin.isatty() and sys.stderr.isatty() and not wanted.from_stdin and not output.as_json
    live = Live(
        client,
        Screen(),
        output,
        conversation,
        tracker,
        "all" if wanted.approve == "all" else "deny" if wanted.approve == "deny" else "ask",
        interrupts=True,
        cursor=submission.cursor,
        renderer=Renderer(prompts=False),
        keyboard=Keyboard() if terminal else None,
    )
    live.know()
    await live.follow()
    code = exit_code(live)
    _tell(live, state, output, code)
    choices = () if live.detached else resuming.choices_of(live)
    if not choices or live.keyboard is None:
        return code, None
    chosen = await resuming.choose(live.screen, live.keyboard, choices)
    if chosen is None:
        output.note(f"   {resuming.hint(live.conversation, choices, data_option(state.data))}")
    return code, chosen


def _ids(submission: Any) -> dict[str, Any]:
    return {
        "request_id": submission.request_id,
        "status": submission.status,
        "response_id": submission.response_id,
        "execution": submission.execution,
        "cursor": submission.cursor,
    }


def attach_line(state: SetState, conversation: str, cursor: str | None) -> str:
    """The exact command that goes on where this one left."""
    parts = ["tether", "attach", conversation]
    if cursor:
        parts += ["--cursor", cursor]
    return shlex.join(parts) + data_option(state.data)


def _tell(live: Live, state: SetState, output: Output, code: Exit) -> None:
    """How it ended: outcome, cost, duration, ids, where the log is."""
    from tether.fold import UsageTotal
    from tether_cli import resuming
    from tether_cli.render import duration, money

    tracker = live.tracker
    folded = tracker.fold.freeze()
    usage: UsageTotal = folded.usage
    seconds = time.monotonic() - live.started_s
    workspace = str((folded.target or {}).get("workspace", "*"))
    subject = f"tether.event.{state.tenant}.{workspace}.{live.conversation}.{tracker.execution or '_'}"
    if output.as_json:
        output.value(
            {
                "kind": "result",
                "outcome": tracker.outcome,
                "detached": live.detached,
                "partial": tracker.partial,
                "error": tracker.error,
                "resume_choices": list(resuming.choices_of(live)),
                "text": folded.text,
                "usage": usage.model_dump(mode="json"),
                "duration_s": round(seconds, 3),
                "conversation": live.conversation,
                "response_id": tracker.response,
                "execution": tracker.execution,
                "cursor": live.cursor,
                "log": {"stream": f"EVENTS_{state.tenant}", "subject": subject},
                "exit_code": int(code),
            }
        )
        return
    say = live.screen.line
    if live.detached:
        if state.ephemeral:
            say("detached: the set was started for this command and ends with it, and the response with it")
        else:
            say("detached: it goes on without you. To come back:")
            say(f"  {attach_line(state, live.conversation, live.cursor)}")
        return
    how = f"{tracker.outcome}{' (in part)' if tracker.partial else ''}"
    unstarted = tracker.outcome == "never_started"  # it has used nothing, and there is nothing of it to look at
    counts = f"{usage.input_tokens} tokens in, {usage.output_tokens} out"
    if (choices := resuming.choices_of(live)) and live.keyboard is None:
        say(f"   {resuming.hint(live.conversation, choices, data_option(state.data))}")
    if hint := hint_of(str((tracker.error or {}).get("code", "")), folded.agent):
        say(f"   {hint}")
    facts = (how, duration(seconds)) if unstarted else (how, money(usage.cost_usd), counts, duration(seconds))
    say(f"── {', '.join(facts)}")
    say(f"   conversation {live.conversation}  execution {tracker.execution or 'none'}")
    if state.ephemeral:
        say(f"   log {subject} (gone with the set)")
    elif tracker.execution is not None and not unstarted:
        say(f"   log {subject}")
        say(f"       tether logs {tracker.execution}{data_option(state.data)}")


def hint_of(code: str, agent: str | None) -> str | None:
    """What to do about an error; about a refused key it is the agent's own."""
    from tether_cli import agents_config

    if code == "model_auth" and agent is not None:
        return f"{agents_config.key_remedy(agent)}; keys are read when it starts"
    return _HINTS.get(code)


def _directory(given: Path) -> Path:
    path = given.expanduser().resolve()
    if not path.is_dir():
        raise CliError(f"{path} is not a directory", remedy="create it first", exit_code=Exit.USAGE)
    return path


async def _assign(state: SetState, path: Path) -> str:
    """The workspace over a directory of the user's: its id follows from the path, so the same one is found again."""
    from tether import subjects
    from tether.bus import connect
    from tether.errors import Problem, ProblemError

    workspace = f"dir_{hashlib.sha256(str(path).encode()).hexdigest()[:24]}"
    async with await connect(state.nats_url, name="tether-run", creds_file=state.nats_creds_file) as bus:
        request = {"tenant": state.tenant, "workspace": workspace, "path": str(path)}
        answer = await bus.request(subjects.agent("workspace"), json.dumps(request).encode(), timeout_s=_ASSIGN_S)
    value = json.loads(answer.data)
    if "problem" in value:
        raise ProblemError(Problem.model_validate(value["problem"]))
    return workspace

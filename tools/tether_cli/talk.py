"""From a command to the set: a client for its state, one event loop, and every failure as one line with its remedy."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx2
import structlog

from tether.api import ControlAnswer, ExecutionView
from tether.client import Client, NatsCredentials
from tether.errors import BusError, Code, InvalidError, ProblemError, QuotaExceededError
from tether.ids import check_token
from tether.settings import ConfigurationError
from tether_cli.output import CliError, Exit, Output, from_problem
from tether_cli.state import SetState

T = TypeVar("T")
PATIENCE_S = 5.0  # the set is on this machine: what does not answer by then is not there
ASK_AGAIN_S = 0.5  # for a receipt that is not known yet

_REMEDIES = {
    Code.RUNTIME_UNAVAILABLE: "`tether doctor` says what is wrong",
    Code.UNAUTHENTICATED: "the token file does not belong to this set; restart it with `tether down` and `tether up`",
    Code.SESSION_BUSY: "wait for the response, stop it with `tether stop`, or send with `tether run --mode takeover`",
    Code.STOP_UNCONFIRMED: "`tether ps` says what runs; `tether run --mode takeover` tries once more",
    Code.REQUEST_SUPERSEDED: "`tether attach CONVERSATION` follows what took its place",
    Code.SESSION_STREAM_NOT_ACTIVE: "`tether run --conversation ID` starts a response",
    Code.LEASE_NOT_READY: "another process sends this conversation's controls; the same command, some seconds later",
    Code.CAPABILITY_MISSING: "`tether stop` ends the execution, `tether run --mode takeover` goes on with a new prompt",
    Code.TARGET_UNKNOWN: "`tether show CONVERSATION` tells what waits, `tether ps` what runs",
    Code.INTERACTION_SETTLED: "`tether show CONVERSATION` says what was answered",
    Code.TARGET_STALE: "`tether ps` lists what runs now",
    Code.NOT_FOUND: "`tether ps --all` lists what there is",
    Code.CONVERSATION_DELETED: "nothing of it is kept; use another conversation id",
    Code.REQUEST_CONFLICT: "this id was used with other content: what it did stands; use another id for something new",
    Code.CURSOR_POSITION_CHANGED: "attach without --cursor",
    Code.DRAINING: "`tether sandbox show` says how far it is; a message waits for it and wakes it again",
    Code.CHECKPOINT_FAILED: "`tether sandbox show` says why; nothing was released",
    Code.RESUME_FAILED: "`tether run --conversation ID --resume fresh` (or `history`) goes on in a new session",
}


def token(value: str, name: str) -> str:
    """`value` if it may name something. Raises CliError naming the argument."""
    try:
        return check_token(value, name)
    except InvalidError as error:
        raise CliError(f"{name} {error.remedy}", exit_code=Exit.USAGE, code=Code.INVALID) from None


def http_client(state: SetState) -> Client:
    return Client.http(state.http_url, state.token, patience_s=PATIENCE_S)


def nats_client(state: SetState) -> Client:
    credentials = NatsCredentials(creds_file=state.nats_creds_file)
    return Client.nats(state.nats_url, credentials, tenant=state.tenant)


def as_cli_error(error: ProblemError) -> CliError:
    told = from_problem(error.problem)
    if isinstance(error, QuotaExceededError):
        told.remedy = _of_quota(error)
    if not told.remedy:
        told.remedy = _REMEDIES.get(error.problem.code, "")
    return told


def _of_quota(error: QuotaExceededError) -> str:
    """What to do about a quota: wait, where waiting helps; else what has to go first."""
    after_s = error.problem.retry_after_s
    if after_s is not None:
        return f"again in {max(1, round(after_s))} s; `tether top` shows what is used of {error.limit}"
    if error.limit == "stored_bytes":
        return "`tether rm CONVERSATION` makes room; `tether top` shows what is stored"
    return "`tether top` shows what is used"


def run(call: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine. Raises CliError for everything that a user can meet."""
    # stdout is the command's: what libraries log goes to stderr, from warnings on.
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        return asyncio.run(call)
    except ProblemError as error:
        raise as_cli_error(error) from None
    except ConfigurationError as error:
        raise CliError("; ".join(error.problems), exit_code=Exit.USAGE) from None
    except BusError as error:
        raise CliError(
            f"the message bus does not answer: {error.detail}",
            remedy="`tether doctor` says what is wrong",
            exit_code=Exit.UNREACHABLE,
        ) from None
    except BrokenPipeError:
        raise  # who read stdout has gone: the frame ends quietly
    except (httpx2.HTTPError, OSError) as error:
        raise CliError(
            f"the set does not answer ({type(error).__name__}: {error})",
            remedy="`tether doctor` says what is wrong",
            exit_code=Exit.UNREACHABLE,
        ) from None


async def known(client: Client, receipt: ControlAnswer) -> ControlAnswer:
    """The receipt; where nobody replied, asked for until it says more or patience is over. It stays the same control,
    so nothing is done twice."""
    deadline_s = time.monotonic() + PATIENCE_S
    while receipt.status == "unknown" and time.monotonic() < deadline_s:
        await asyncio.sleep(ASK_AGAIN_S)
        try:
            found = await client.receipt(receipt.control_id, execution=receipt.execution)
        except ProblemError:
            continue  # not known (yet): the first word stands
        if found.problem is None:
            receipt = found
    return receipt


def tell_unknown(output: Output, receipt: ControlAnswer, what: str) -> Exit:
    """What to do next where nobody knows whether a control took effect."""
    output.say(f"{receipt.execution}: no reply in time, so whether {what} is unknown; nothing was sent twice")
    output.say(f"  `tether show {receipt.execution}` tells what it came to")
    return Exit.LOST


async def active_execution(client: Client, name: str) -> ExecutionView:
    """The execution that `name` means: itself, or the one that runs in the conversation of this name."""
    try:
        view = await client.execution(name)
    except ProblemError as error:
        if error.problem.code is not Code.NOT_FOUND:
            raise
    else:
        if view.state == "ended":
            how = f" ({view.outcome})" if view.outcome else ""
            raise CliError(f"{name} has ended{how}", remedy="`tether ps` lists what runs", code=Code.TARGET_STALE)
        return view
    found = (await client.executions(conversation=name, active=True, limit=1)).executions
    if not found:
        raise CliError(
            f"{name} is neither an execution nor a conversation in which one runs",
            remedy="`tether ps` lists what runs",
            exit_code=Exit.USAGE,
            code=Code.NOT_FOUND,
        )
    return found[0]


async def execution(client: Client, name: str, otherwise: str) -> ExecutionView:
    """The execution of this id. Raises CliError saying what `name` is otherwise."""
    try:
        return await client.execution(name)
    except ProblemError as error:
        if error.problem.code is not Code.NOT_FOUND:
            raise
        raise CliError(
            f"{name} is {otherwise}",
            remedy="`tether ps --all` lists executions and their conversations",
            exit_code=Exit.USAGE,
            code=Code.NOT_FOUND,
        ) from None

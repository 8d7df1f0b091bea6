"""What `/openapi.json` says of sandboxes: drain, suspend, resume and delete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tether.api_sandboxes import (
    CheckpointView,
    DrainRequest,
    DrainView,
    ResumeRequest,
    ResumeView,
    SandboxList,
    SandboxView,
    SuspendRequest,
)
from tether.checkpoint import DrainedExecution
from tether.errors import Code, problem
from tether.ids import TOKEN_REMEDY
from tether.limits import DRAIN_GRACE_S, DRAIN_TURN_SHARE
from tether.sandbox import no_sandbox
from tether_backend.http import openapi_examples as ex
from tether_backend.http import openapi_refusals as no
from tether_backend.http.openapi import Answer, Body, Parameter, Refusal, Route

_DRAIN_ID: Final = "maintenance-7"
_ACTIVE: Final = SandboxView(
    workspace=ex.WORKSPACE,
    sandbox=ex.SANDBOX,
    state="active",
    provider="local",
    connected=True,
    boot=ex.TARGET.boot,
    capabilities=["executionSnapshotAttach", "sandboxDrainV1"],
    agents=["claude", "scripted"],
    version="0.1.0",
    idle_since=ex.AT + 4_000,
    updated_at=ex.AT,
)
_CHECKPOINT: Final = CheckpointView(
    checkpoint="ckp_5f0c7d1e2a3b",
    created_at=ex.AT + 60_000,
    clean=True,
    include="sessions",
    stored="volume",
    size_bytes=184_320,
    files=7,
    revision=12,
)
_LEFT: Final = DrainedExecution(
    target=ex.TARGET,
    outcome="graceful",
    agent="scripted",
    native_session=ex.TARGET.native_session,
    resumable=True,
    cut=True,
    interrupted=("look",),
    last_ordinal=14,
)
_RUNNING: Final = DrainView(
    workspace=ex.WORKSPACE,
    drain=_DRAIN_ID,
    state="running",
    phase="turn",
    purpose="drain",
    sandbox_state="draining",
)
_DONE: Final = _RUNNING.model_copy(
    update={
        "state": "done",
        "phase": "over",
        "sandbox_state": "suspended",
        "executions": [_LEFT],
        "checkpoint": _CHECKPOINT,
    }
)
_FAILED: Final = _DONE.model_copy(
    update={
        "state": "failed",
        "sandbox_state": "active",
        "executions": [_LEFT.model_copy(update={"outcome": "checkpoint_failed", "detail": "no space left on device"})],
        "checkpoint": None,
        "problem": problem(Code.CHECKPOINT_FAILED, "the checkpoint could not be written: no space left on device"),
    }
)
_SUSPENDED: Final = _ACTIVE.model_copy(
    update={
        "state": "suspended",
        "connected": False,
        "boot": None,
        "capabilities": [],
        "agents": [],
        "version": None,
        "idle_since": None,
        "drained": _DONE.model_copy(update={"purpose": None, "sandbox_state": None}),
        "checkpoint": _CHECKPOINT,
    }
)
_WOKEN: Final = ResumeView(workspace=ex.WORKSPACE, state="resuming", woken=True, checkpoint=_CHECKPOINT)

_WORKSPACE: Final = Parameter("The workspace's id, as a conversation or the list names it.", ex.WORKSPACE)
_OPERATION: Final = Parameter("The operation's id, as its beginner chose it or was told.", _DRAIN_ID)
_BAD_WORKSPACE: Final = Refusal.of(
    "bad_workspace_path", Code.INVALID, f"path.workspace: {TOKEN_REMEDY}", field="path.workspace"
)
_BAD_DRAIN: Final = Refusal.of("bad_drain", Code.INVALID, f"drain_id: {TOKEN_REMEDY}", field="drain_id")
_BAD_DRAIN_PATH: Final = Refusal.of(
    "bad_drain_path", Code.INVALID, f"path.drain_id: {TOKEN_REMEDY}", field="path.drain_id"
)
_BAD_GRACE: Final = Refusal.of("bad_grace", Code.INVALID, "query.grace_s: must be at least 0", field="query.grace_s")
_BAD_RESUME: Final = Refusal.of(
    "bad_resume_body", Code.INVALID, "drain_id: is not known; leave it out", field="drain_id"
)
_NO_SANDBOX: Final = Refusal.of("no_sandbox", Code.NOT_FOUND, no_sandbox().detail, field="workspace")
_NO_DRAIN: Final = Refusal.of("no_drain", Code.NOT_FOUND, "drain_id: the sandbox has no operation of this id")
_BUSY: Final = Refusal.of(
    "sandbox_busy",
    Code.SESSION_BUSY,
    "the sandbox is not idle; wait, or suspend it with force",
    executions=[{"conversation": ex.CONVERSATION, "execution": ex.EXECUTION, "state": "waiting"}],
)
_DRAINING: Final = Refusal.of("draining", Code.DRAINING, "the sandbox is draining", retry_after_s=5.0, drain=_DRAIN_ID)
_CANNOT: Final = Refusal.of(
    "cannot_drain", Code.CAPABILITY_MISSING, "the sandbox's collector cannot drain (sandboxDrainV1)"
)
_UNVERIFIED: Final = Refusal.of(
    "checkpoint_unreadable",
    Code.CHECKPOINT_FAILED,
    "the existing checkpoint cannot be verified; with checkpoint false it is given up",
)
_NO_AGENT: Final = Refusal.of(
    "no_agent_service", Code.RUNTIME_UNAVAILABLE, "no agent service answers for now", retry_after_s=1.0
)
_ASKED: Final = (*no.EDGE, _BAD_WORKSPACE, _NO_SANDBOX, _NO_AGENT, no.NO_BUS)
_BEGINS: Final = (*_ASKED, _BAD_DRAIN, _DRAINING, _CANNOT)
_JOINS: Final = (
    "The same `drain_id` again joins the operation, also after its end; another one while it runs joins the running "
    "one, and `drain` is its id. Ask `GET …/drains/{drain_id}` until `state` is `done` or `failed`."
)
_BEGUN: Final = Answer(
    "What began, or was joined", DrainView, {"running": ex.json_of(_RUNNING), "over": ex.json_of(_DONE)}
)
_BODY: Final = {
    "named": {"drain_id": _DRAIN_ID, "grace_s": 120, "reason": "kernel update"},
    "to another machine": {"store": "both", "include": "workspace"},
}

SANDBOX_ROUTES: Final[Mapping[str, Route]] = {
    "GET /v1/sandboxes": Route(
        "Sandboxes",
        "listSandboxes",
        "List sandboxes",
        "Each with its life-cycle record, what it goes on from and, where its collector is registered, what that says. "
        "Reading wakes no sandbox.",
        {200: Answer("All of them", SandboxList, {"two": ex.json_of(SandboxList(sandboxes=[_ACTIVE, _SUSPENDED]))})},
        (*no.EDGE, no.NO_BUS),
    ),
    "GET /v1/sandboxes/{workspace}": Route(
        "Sandboxes",
        "getSandbox",
        "Read a sandbox",
        "`drain` while it drains, `drained` what the last drain came to, `checkpoint` what a resume goes on from. "
        "Reading wakes no sandbox.",
        {
            200: Answer(
                "The sandbox",
                SandboxView,
                {"active": ex.json_of(_ACTIVE), "suspended": ex.json_of(_SUSPENDED)},
            )
        },
        (*no.EDGE, _BAD_WORKSPACE, _NO_SANDBOX, no.NO_BUS),
        {"workspace": _WORKSPACE},
    ),
    "DELETE /v1/sandboxes/{workspace}": Route(
        "Sandboxes",
        "deleteSandbox",
        "Delete a sandbox",
        "Drained first, as by `drain`, then nothing of its compute is left and its record goes; its checkpoint stays. "
        "What is suspended already is not drained: its checkpoint is verified, or said to be none. A conversation goes "
        "on from there with its next message. " + _JOINS,
        {202: _BEGUN},
        (*_BEGINS, _BAD_GRACE, _UNVERIFIED),
        {
            "workspace": _WORKSPACE,
            "drain_id": _OPERATION,
            "grace_s": Parameter("Seconds until everything is killed.", 60),
            "reason": Parameter("Told in the checkpoint and the log.", "project is over"),
            "store": Parameter("Where the checkpoint goes.", "both"),
            "include": Parameter("What of the workspace is in it.", "sessions"),
            "checkpoint": Parameter("`false`: end it without a checkpoint.", True),
        },
    ),
    "POST /v1/sandboxes/{workspace}/drain": Route(
        "Sandboxes",
        "drainSandbox",
        "Drain a sandbox",
        "No new starts; a turn under way may finish within its share of the grace "
        f"({DRAIN_TURN_SHARE:.0%} of {DRAIN_GRACE_S:g} s unless said otherwise), then SIGTERM, at the end of the grace "
        "SIGKILL; then a checkpoint, and its compute is released. The next message wakes it. " + _JOINS,
        {202: _BEGUN},
        (*_BEGINS, no.TOO_LARGE),
        {"workspace": _WORKSPACE},
        Body(DrainRequest, _BODY, required=False, description="May be left out."),
    ),
    "POST /v1/sandboxes/{workspace}/suspend": Route(
        "Sandboxes",
        "suspendSandbox",
        "Suspend an idle sandbox",
        "A drain of a sandbox in which nothing runs or waits; with `force` whatever does. " + _JOINS,
        {202: _BEGUN},
        (*_BEGINS, _BUSY, no.TOO_LARGE),
        {"workspace": _WORKSPACE},
        Body(
            SuspendRequest, {**_BODY, "whatever runs": {"force": True}}, required=False, description="May be left out."
        ),
    ),
    "POST /v1/sandboxes/{workspace}/resume": Route(
        "Sandboxes",
        "resumeSandbox",
        "Resume a sandbox",
        "Wakes a suspended one, once, whoever asks; a message does the same by itself.",
        {202: Answer("It wakes, or is awake", ResumeView, {"woken": ex.json_of(_WOKEN)})},
        (*_ASKED, _DRAINING, _BAD_RESUME, no.TOO_LARGE),
        {"workspace": _WORKSPACE},
        Body(ResumeRequest, {"empty": {}}, required=False, description="May be left out."),
    ),
    "GET /v1/sandboxes/{workspace}/drains/{drain_id}": Route(
        "Sandboxes",
        "getDrain",
        "Read how a drain stands",
        "Of a drain, suspend or delete: its phase while it runs, what became of each execution, its checkpoint, or why "
        "there is none.",
        {
            200: Answer(
                "The operation",
                DrainView,
                {
                    "running": ex.json_of(_RUNNING),
                    "over": ex.json_of(_DONE),
                    "failed": ex.json_of(_FAILED),
                },
            )
        },
        (*_ASKED, _BAD_DRAIN_PATH, _NO_DRAIN),
        {"workspace": _WORKSPACE, "drain_id": _OPERATION},
    ),
}

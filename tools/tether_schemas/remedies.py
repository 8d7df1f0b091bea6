"""What to do about each error code: the last column of docs/reference/errors.md."""

from __future__ import annotations

from typing import Final

from tether.errors import Code

REMEDIES: Final[dict[Code, str]] = {
    Code.RUNTIME_UNAVAILABLE: "Send the same request again after `retry_after_s`; `/readyz` names the check that "
    "fails. A message keeps its `request_id`, a control its id: nothing happens twice.",
    Code.SESSION_STREAM_NOT_ACTIVE: "Nothing runs that could take this. Send the message with mode `auto`; "
    "`context.ended` says that the response is over.",
    Code.SESSION_BUSY: "Wait for the response's end, or stop the execution; then send again. Of a suspend: "
    "`context.executions` says who is active; `force` drains.",
    Code.REQUEST_CONFLICT: "The id was used for something else: draw a new one for a new request, or repeat the "
    "original bytes.",
    Code.REQUEST_SUPERSEDED: "Another request took over the conversation. Send a new request if it is still wanted.",
    Code.LEASE_NOT_READY: "Another process sends this conversation's controls; it lets go when it is idle. Try again.",
    Code.TARGET_STALE: "The execution is over or was replaced: read `context.current` and decide anew.",
    Code.TARGET_UNKNOWN: "This sandbox does not know it (yet): check the id, try again shortly.",
    Code.STOP_UNCONFIRMED: "The stop was taken, its proof is not here: ask `GET /v1/controls/{control}` again.",
    Code.CAPABILITY_MISSING: "The agent, its version or its sandbox cannot do this: `tether doctor` says what is "
    "there.",
    Code.INTERACTION_SETTLED: "Somebody else answered first, or it expired: the history shows with what.",
    Code.EXECUTION_DURABILITY_GAP: "A part was lost before it was stored; the gap says which. Nothing brings it back.",
    Code.RETENTION_GAP: "The log no longer has it (`TETHER_EVENTS_MAX_AGE_S`, `…_MAX_BYTES`): use the snapshot that "
    "follows.",
    Code.CONVERSATION_DELETED: "It was deleted on purpose and nothing of it is kept. Use another conversation id; this "
    "one is free again at `context.free_at` (unix ms).",
    Code.CURSOR_POSITION_CHANGED: "The log was made anew or put back: take the snapshot that follows, and its cursor.",
    Code.DRAINING: "The sandbox is being put to sleep: a message waits for it by itself; ask again after "
    "`retry_after_s`, `GET …/drains/{drain_id}` says how far it is.",
    Code.CHECKPOINT_FAILED: "Compute was kept; the detail says what failed. Mend it (disk, quota) and drain again.",
    Code.RESUME_FAILED: "The agent's own session is gone: send the same content as a new request with `resume` `fresh` "
    "or `history` (`error.choices` says which).",
    Code.QUOTA_EXCEEDED: "`context.limit` names the quota, `context.value` what it allows, `context.scope` to whom. "
    "With `retry_after_s` time alone ends it (`context.reset_at`, unix ms: all of it is there again): send the same "
    "request then. Without it something must go first: delete conversations, or ask for more.",
    Code.UNAUTHENTICATED: "Send `Authorization: Bearer …` with a token of TETHER_HTTP_TOKENS_FILE.",
    Code.FORBIDDEN: "`fields` says what is not allowed: the Host (TETHER_HTTP_HOSTS) or the Origin "
    "(TETHER_HTTP_ORIGINS), or what these credentials may not do.",
    Code.NOT_FOUND: "Check the id and the path. What is quite new may be listed a moment later.",
    Code.INVALID: "`fields` names each offending field with what would be accepted.",
}

"""Subjects and names: built and parsed here only, token positions fixed (tenant first)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tether.errors import InvalidError
from tether.ids import check_token
from tether.limits import EXECUTION_TOKEN_CONVERSATION

ANY_WORKSPACE: Final = "*"  # in filters only
PROMPTS_STREAM: Final = "PROMPTS"
COMMANDS_STREAM: Final = "COMMANDS"
PROMPTS_ALL: Final = "tether.prompt.>"
COMMANDS_ALL: Final = "tether.command.>"

OWNERS: Final = "tether_owners"
REQUESTS: Final = "tether_requests"
LEASES: Final = "tether_leases"
NOTIFICATIONS: Final = "tether_notifications"
WEBHOOKS_DURABLE: Final = "webhooks"  # one per tenant's log, where webhooks are configured
CHECKPOINTS: Final = "tether_checkpoints"
SANDBOXES: Final = "tether_sandboxes"
PROJECTIONS: Final = "tether_projections"
CONVERSATIONS: Final = "tether_conversations"
DELETIONS: Final = "tether_deletions"
QUOTAS: Final = "tether_quotas"

ROUTER_DURABLE: Final = "router"
AGENT_DURABLE: Final = "agent-service"
SUBJECTS_CACHED_MAX: Final = 1024  # parsed subjects that a process remembers: half a KiB each


@dataclass(frozen=True, slots=True)
class EventAddress:
    """Where an event lives. `execution` is `_` for conversation-level events."""

    tenant: str
    workspace: str
    conversation: str
    execution: str

    @property
    def conversation_level(self) -> bool:
        return self.execution == EXECUTION_TOKEN_CONVERSATION

    @property
    def subject(self) -> str:
        return f"tether.event.{self.tenant}.{self.workspace}.{self.conversation}.{self.execution}"

    @property
    def live(self) -> str:
        return f"tether.live.{self.tenant}.{self.workspace}.{self.conversation}.{self.execution}"


def _tokens(*named: tuple[str, str]) -> str:
    return ".".join(check_token(value, name) for name, value in named)


def prompt(tenant: str, workspace: str, conversation: str) -> str:
    return "tether.prompt." + _tokens(("tenant", tenant), ("workspace", workspace), ("conversation", conversation))


def command(tenant: str, workspace: str) -> str:
    return "tether.command." + _tokens(("tenant", tenant), ("workspace", workspace))


def events_stream(tenant: str) -> str:
    return f"EVENTS_{check_token(tenant, 'tenant')}"


def blobs_stream(tenant: str) -> str:
    return f"BLOBS_{check_token(tenant, 'tenant')}"


def quarantine_stream(tenant: str) -> str:
    return f"QUARANTINE_{check_token(tenant, 'tenant')}"


def quarantine(address: EventAddress) -> str:
    """Where a message of that address lies that was refused: the same tokens."""
    return f"tether.quarantine.{address.tenant}.{address.workspace}.{address.conversation}.{address.execution}"


def event(tenant: str, workspace: str, conversation: str, execution: str) -> str:
    return EventAddress(
        check_token(tenant, "tenant"),
        check_token(workspace, "workspace"),
        check_token(conversation, "conversation"),
        check_token(execution, "execution"),
    ).subject


def conversation_events(tenant: str, workspace: str, conversation: str) -> str:
    """Filter: every event subject of one conversation. `ANY_WORKSPACE` where its workspace is not known (yet)."""
    if workspace == ANY_WORKSPACE:
        return f"tether.event.{check_token(tenant, 'tenant')}.*.{check_token(conversation, 'conversation')}.*"
    return event(tenant, workspace, conversation, "x")[:-1] + "*"


def conversation_live(tenant: str, workspace: str, conversation: str) -> str:
    """Filter: the live copies of one conversation."""
    return "tether.live." + conversation_events(tenant, workspace, conversation).removeprefix("tether.event.")


@lru_cache(maxsize=SUBJECTS_CACHED_MAX)
def parse_event(subject: str) -> EventAddress:
    """Parse an event or live subject; raises `InvalidError` on anything else. Remembered: the messages of a running
    execution all have the same one."""
    parts = subject.split(".")
    if len(parts) != 6 or parts[0] != "tether" or parts[1] not in ("event", "live"):
        raise InvalidError("subject", "must be tether.event.{tenant}.{workspace}.{conversation}.{execution}")
    names = ("tenant", "workspace", "conversation", "execution")
    return EventAddress(*(check_token(part, name) for part, name in zip(parts[2:], names, strict=True)))


def parse_prompt(subject: str) -> tuple[str, str, str]:
    """(tenant, workspace, conversation) of a prompt's subject."""
    parts = subject.split(".")
    if len(parts) != 5 or parts[:2] != ["tether", "prompt"]:
        raise InvalidError("subject", "must be tether.prompt.{tenant}.{workspace}.{conversation}")
    tenant, workspace, conversation = (
        check_token(part, name) for part, name in zip(parts[2:], ("tenant", "workspace", "conversation"), strict=True)
    )
    return tenant, workspace, conversation


def parse_command(subject: str) -> tuple[str, str]:
    """(tenant, workspace) of a command's subject."""
    parts = subject.split(".")
    if len(parts) != 4 or parts[:2] != ["tether", "command"]:
        raise InvalidError("subject", "must be tether.command.{tenant}.{workspace}")
    return check_token(parts[2], "tenant"), check_token(parts[3], "workspace")


def control(tenant: str, workspace: str, verb: str) -> str:
    return "tether.control." + _tokens(("tenant", tenant), ("workspace", workspace), ("verb", verb))


def control_all(tenant: str, workspace: str) -> str:
    return "tether.control." + _tokens(("tenant", tenant), ("workspace", workspace)) + ".>"


def reply_base(subject: str) -> str | None:
    """Where the answer to a question on this subject goes: `tether.reply.{tenant}.{workspace}` for a sandbox's
    (`tether.control.…`), so that a sandbox may answer for its own workspace and for no other; None: the own inbox."""
    parts = subject.split(".", 4)
    if len(parts) < 4 or parts[:2] != ["tether", "control"]:
        return None
    return f"tether.reply.{parts[2]}.{parts[3]}"


def replies(base: str, asker: str) -> str:
    """What whoever asks sandboxes of this base's tenant listens to: their answers to `asker` (a token of its own)."""
    return f"{base.rpartition('.')[0]}.*.{check_token(asker, 'asker')}.*"


def replies_all(tenant: str, workspace: str) -> str:
    """What a sandbox of this workspace may answer on."""
    return "tether.reply." + _tokens(("tenant", tenant), ("workspace", workspace)) + ".>"


def agent(verb: str) -> str:
    return "tether.agent." + check_token(verb, "verb")


def blob(tenant: str, workspace: str, kind: str, digest: str, part: int | str) -> str:
    """A chunk of a blob, or its manifest (`part` = `manifest`), written last."""
    if kind not in ("artifact", "checkpoint"):
        raise InvalidError("kind", "must be artifact or checkpoint")
    return "tether.blob." + _tokens(
        ("tenant", tenant), ("workspace", workspace), ("kind", kind), ("digest", digest), ("part", str(part))
    )


def owner_key(tenant: str, workspace: str, conversation: str) -> str:
    return _tokens(("tenant", tenant), ("workspace", workspace), ("conversation", conversation))


def request_key(tenant: str, request_id: str) -> str:
    return _tokens(("tenant", tenant), ("request_id", request_id))


def lease_key(tenant: str, workspace: str, conversation: str) -> str:
    return "control." + owner_key(tenant, workspace, conversation)


def sandbox_key(tenant: str, workspace: str) -> str:
    return _tokens(("tenant", tenant), ("workspace", workspace))


def checkpoint_key(tenant: str, workspace: str) -> str:
    return _tokens(("tenant", tenant), ("workspace", workspace))


def history(tenant: str, workspace: str) -> str:
    """Where a backend answers for the rows of a conversation of this workspace (see `tether.history`): a sandbox may
    ask for its own workspace's and for no other."""
    return "tether.history." + _tokens(("tenant", tenant), ("workspace", workspace))


def histories(tenant: str) -> str:
    """What a backend answers on: `history` of every workspace of the tenant."""
    return "tether.history." + _tokens(("tenant", tenant)) + ".*"


def registration_key(tenant: str, workspace: str, sandbox: str) -> str:
    return _tokens(("tenant", tenant), ("workspace", workspace), ("sandbox", sandbox))


def conversation_key(tenant: str, conversation: str) -> str:
    return _tokens(("tenant", tenant), ("conversation", conversation))


def deletion_key(tenant: str, conversation: str) -> str:
    return _tokens(("tenant", tenant), ("conversation", conversation))


def projection_key(database: str, tenant: str, shard: int) -> str:
    return _tokens(("database", database), ("tenant", tenant), ("shard", str(shard)))


def projector_lease_key(tenant: str, shard: int) -> str:
    return "projector." + _tokens(("tenant", tenant), ("shard", str(shard)))


def webhooks_lease_key(tenant: str) -> str:
    return "webhooks." + _tokens(("tenant", tenant))


def webhook_start_key(tenant: str, endpoint: str) -> str:
    return _tokens(("tenant", tenant), ("endpoint", endpoint))


def notification_key(tenant: str, endpoint: str, notification: str) -> str:
    return _tokens(("tenant", tenant), ("endpoint", endpoint), ("notification", notification))


def prompt_rate_key(tenant: str, workspace: str | None = None) -> str:
    """How far a tenant's, or one workspace's, allowance of prompts is used up; written by backends."""
    if workspace is None:
        return "prompts." + _tokens(("tenant", tenant))
    return "prompts." + _tokens(("tenant", tenant), ("workspace", workspace))


def running_key(tenant: str | None) -> str:
    """Who holds the places for running executions, of a tenant or of the whole set; written by routers."""
    return "running_all" if tenant is None else "running." + _tokens(("tenant", tenant))


def projection_durable(database: str, shard: int) -> str:
    return f"projection-{check_token(database, 'database')}-{shard}"

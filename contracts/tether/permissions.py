"""Who may do what on NATS: the permissions of every role, made from the topology and the subjects. Pure.

Two boundaries, of different strength:

* **Sandboxes** run code that a model wrote. Each workspace has an **account** of its own, in which nothing exists but
  what it imports: its events, blobs and registration to publish, its records to read, one at a time, its controls to
  hear. An account is what confines: permissions of a user do not look at the reply subject of what it publishes, and
  the server answers there in the user's account with its own authority. A user of the services' account that may
  publish one event could so have any content stored under any subject (the answer to a direct get, sent to another's
  record). In an account of its own the answer finds nothing.
* **Services** share one account with JetStream. There permissions keep each role to what it needs: against mistakes and
  against what is read from its inbox. They are no fence against a service that was taken over, for the reason above.

Every stream is read by a form of its own: `$JS.API.STREAM.MSG.GET.{stream}` and `$JS.API.DIRECT.GET.{stream}` carry the
subject in the payload and read the whole stream; `$JS.API.DIRECT.GET.{stream}.{subject}` reads the last message of that
subject, and is the only one that a sandbox has. No management of streams or consumers is a sandbox's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tether import subjects, topology
from tether.ids import check_token
from tether.limits import EXECUTION_TOKEN_CONVERSATION
from tether.nkey_jwt import Allowed, Export, Import

Role = Literal["backend", "router", "agent", "client", "operator", "observer"]
ROLES: Final[tuple[Role, ...]] = ("backend", "router", "agent", "client", "operator", "observer")
ABOUT: Final[dict[Role, str]] = {
    "backend": "answers HTTP, projects the log, holds leases, submits prompts",
    "router": "makes the streams, admits prompts, writes owner records, orders starts",
    "agent": "runs sandboxes: takes commands, answers requests, closes what was lost",
    "client": "an integrator's own backend: submits prompts, follows the log, sends controls",
    "operator": "the Kubernetes operator: asks the agent service, submits prompts, reads records",
    "observer": "dashboards and the nats CLI: reads everything of its tenants, changes nothing",
}
SANDBOX: Final = "sandbox"
API: Final = "$JS.API"
ANY: Final = "*"
TENANTS_NAMED_MAX: Final = 32
RESPONSE_TTL_S: Final = 600  # for an answer of a service: a sandbox that is brought up takes its time
_SERVICE, _STREAM = "service", "stream"
_CONTROL_KINDS: Final = (subjects.OWNERS, subjects.LEASES, subjects.CHECKPOINTS)


def inbox_prefix(role: str, *tokens: str) -> str:
    """Where this role's answers come: nobody else may listen there."""
    return ".".join((f"_INBOX_{role}", *tokens))


def sandbox_inbox(tenant: str, workspace: str) -> str:
    return inbox_prefix(SANDBOX, check_token(tenant, "tenant"), check_token(workspace, "workspace"))


def matches(pattern: str, subject: str) -> bool:
    """Whether a subscription to `pattern` would get everything on `subject` (which may have wildcards itself)."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or given[index] == ">":
            return False
        if token != "*" and token != given[index]:
            return False
    return len(wanted) == len(given)


def may_publish(allowed: Allowed, subject: str) -> bool:
    return _may(allowed.publish, allowed.publish_deny, subject)


def may_subscribe(allowed: Allowed, subject: str) -> bool:
    return _may(allowed.subscribe, allowed.subscribe_deny, subject)


def _may(allow: Sequence[str], deny: Sequence[str], subject: str) -> bool:
    return any(matches(each, subject) for each in allow) and not any(matches(each, subject) for each in deny)


# --- services ---


class _Table:
    """Collects one role's subjects, in the order in which they are told."""

    def __init__(self, role: Role, tenants: Sequence[str]) -> None:
        inbox = f"{inbox_prefix(role)}.>"
        self.tenants = tenants
        self.publish = [inbox, f"{API}.INFO"]
        self.subscribe = [inbox]
        self.responses = False

    def of_tenants(self, make: Callable[[str], str]) -> list[str]:
        return [make(tenant) for tenant in self.tenants]

    def streams(self, make: Callable[[str], str]) -> list[str]:
        """The streams of that kind, one for each tenant."""
        return [ANY if tenant == ANY else make(tenant) for tenant in self.tenants]

    def all_streams(self) -> list[str]:
        found = list(topology.names(topology.base()))
        for tenant in self.tenants:
            found += [ANY] if tenant == ANY else topology.names(topology.tenant(tenant))
        return found

    def sends(self, *found: str) -> None:
        self.publish += found

    def hears(self, *found: str) -> None:
        self.subscribe += found

    def reads(self, *streams: str) -> None:
        """Every message of these streams, from the leader, by batch and one by one; their state."""
        for stream in streams:
            self.publish += [
                f"{API}.STREAM.INFO.{stream}",
                f"{API}.STREAM.MSG.GET.{stream}",
                f"{API}.DIRECT.GET.{stream}",
                f"{API}.DIRECT.GET.{stream}.>",
            ]

    def reads_buckets(self, *names: str) -> None:
        self.reads(*(f"KV_{name}" for name in names))

    def writes_buckets(self, *names: str) -> None:
        self.publish += [f"$KV.{name}.>" for name in names]

    def takes(self, stream: str, durable: str) -> None:
        """Jobs of a durable consumer."""
        self.publish += [
            f"{API}.CONSUMER.INFO.{stream}.{durable}",
            f"{API}.CONSUMER.MSG.NEXT.{stream}.{durable}",
            f"$JS.ACK.{stream}.{durable}.>",
        ]

    def makes_consumers(self, stream: str) -> None:
        """Its own durable consumers (their names carry what only the service knows)."""
        self.takes(stream, "*")
        self.publish += [
            f"{API}.CONSUMER.CREATE.{stream}.*",
            f"{API}.CONSUMER.CREATE.{stream}.*.>",
            f"{API}.CONSUMER.DELETE.{stream}.*",
        ]

    def makes_everything(self) -> None:
        for stream in self.all_streams():
            self.publish += [f"{API}.STREAM.{verb}.{stream}" for verb in ("INFO", "CREATE", "UPDATE")]
        for consumer in topology.base().consumers:
            where = f"{consumer.stream}.{consumer.durable}"
            self.publish += [f"{API}.CONSUMER.{verb}.{where}" for verb in ("INFO", "CREATE")]

    def awaits(self) -> None:
        """Whether the streams are there that the router makes."""
        self.publish += [f"{API}.STREAM.INFO.{stream}" for stream in self.all_streams()]

    def tells_conversations(self) -> None:
        """Events of conversations, on `_`; never those of an execution."""
        self.publish += self.of_tenants(lambda tenant: f"tether.event.{tenant}.*.*.{EXECUTION_TOKEN_CONVERSATION}")

    def asks_sandboxes(self) -> None:
        self.publish += self.of_tenants(lambda tenant: f"tether.control.{tenant}.*.*")
        self.subscribe += self.of_tenants(lambda tenant: f"tether.reply.{tenant}.*.*.*")

    def answers(self, *found: str) -> None:
        """Requests on these subjects, and the questions of `nats micro`."""
        self.subscribe += [*found, "$SRV.>"]
        self.responses = True

    def allowed(self) -> Allowed:
        return Allowed(
            publish=tuple(dict.fromkeys(self.publish)),
            subscribe=tuple(dict.fromkeys(self.subscribe)),
            responses=self.responses,
            response_ttl_s=RESPONSE_TTL_S,
        )


def service(role: Role, tenants: Sequence[str]) -> Allowed:
    """The permissions of a role in the services' account, for these tenants. Beyond TENANTS_NAMED_MAX of them they are
    not named one by one: the table would outgrow what servers tell each other."""
    names = [check_token(tenant, "tenant") for tenant in tenants]
    if len(names) > TENANTS_NAMED_MAX:
        names = [ANY]
    table = _Table(role, names)
    _FILL[role](table)
    return table.allowed()


def _router(table: _Table) -> None:
    table.makes_everything()
    table.takes(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE)
    table.reads(subjects.PROMPTS_STREAM, *table.streams(subjects.events_stream))
    records = (subjects.OWNERS, subjects.REQUESTS, subjects.CONVERSATIONS, subjects.QUOTAS)
    table.reads_buckets(*records, subjects.CHECKPOINTS, subjects.SANDBOXES)
    table.writes_buckets(*records)
    _deletes(table)
    table.tells_conversations()
    table.sends(*table.of_tenants(lambda tenant: f"tether.command.{tenant}.*"))
    table.asks_sandboxes()
    table.hears("tether.live.>")


def _deletes(table: _Table) -> None:
    """Deletions of conversations: everything that names one, wherever it is stored."""
    written = (subjects.DELETIONS, subjects.LEASES, subjects.NOTIFICATIONS, subjects.CHECKPOINTS)
    table.reads_buckets(subjects.DELETIONS, subjects.LEASES, subjects.NOTIFICATIONS, subjects.PROJECTIONS)
    table.writes_buckets(*written)
    table.reads(subjects.COMMANDS_STREAM)
    table.reads(*table.streams(subjects.blobs_stream), *table.streams(subjects.quarantine_stream))
    erased = [subjects.PROMPTS_STREAM, subjects.COMMANDS_STREAM]
    for kind in (subjects.events_stream, subjects.blobs_stream, subjects.quarantine_stream):
        erased += table.streams(kind)
    table.sends(*(f"{API}.STREAM.MSG.DELETE.{stream}" for stream in erased))
    buckets = (subjects.OWNERS, subjects.CONVERSATIONS, subjects.CHECKPOINTS, subjects.NOTIFICATIONS)
    table.sends(*(f"{API}.STREAM.PURGE.KV_{name}" for name in buckets))
    table.sends(subjects.agent("forget"))


def _backend(table: _Table) -> None:
    logs = table.streams(subjects.events_stream)
    table.awaits()
    table.reads(subjects.PROMPTS_STREAM, *logs)
    table.reads(*table.streams(subjects.blobs_stream), *table.streams(subjects.quarantine_stream))
    for log in logs:
        table.makes_consumers(log)
    own = (subjects.LEASES, subjects.PROJECTIONS, subjects.NOTIFICATIONS, subjects.QUOTAS, subjects.DELETIONS)
    read = (subjects.OWNERS, subjects.REQUESTS, subjects.CONVERSATIONS, subjects.SANDBOXES, subjects.CHECKPOINTS)
    table.reads_buckets(*own, *read)
    table.writes_buckets(*own)
    table.sends(*table.of_tenants(lambda tenant: f"tether.prompt.{tenant}.>"))
    table.sends(*table.of_tenants(lambda tenant: f"tether.quarantine.{tenant}.>"))
    table.tells_conversations()  # that a reader's stream was brought back
    table.sends("tether.agent.*")
    table.asks_sandboxes()
    table.hears(*table.of_tenants(lambda tenant: f"tether.live.{tenant}.>"))
    table.answers(*table.of_tenants(lambda tenant: f"tether.history.{tenant}.*"))


def _agent(table: _Table) -> None:
    table.takes(subjects.COMMANDS_STREAM, subjects.AGENT_DURABLE)
    table.reads(subjects.COMMANDS_STREAM, subjects.PROMPTS_STREAM)
    table.reads(*table.streams(subjects.events_stream), *table.streams(subjects.blobs_stream))
    table.reads_buckets(subjects.OWNERS, subjects.SANDBOXES, subjects.CHECKPOINTS)
    table.awaits()
    table.writes_buckets(subjects.SANDBOXES, subjects.CHECKPOINTS)
    table.sends(*table.of_tenants(lambda tenant: f"tether.event.{tenant}.>"))
    table.sends(*table.of_tenants(lambda tenant: f"tether.prompt.{tenant}.>"))  # continuations of what a drain cut
    table.asks_sandboxes()
    table.answers("tether.agent.*")


def _client(table: _Table) -> None:
    logs = table.streams(subjects.events_stream)
    table.reads(subjects.PROMPTS_STREAM, *logs, *table.streams(subjects.blobs_stream))
    for log in logs:
        table.makes_consumers(log)
    table.reads_buckets(subjects.OWNERS, subjects.REQUESTS, subjects.CONVERSATIONS, subjects.SANDBOXES)
    table.reads_buckets(subjects.CHECKPOINTS, subjects.LEASES, subjects.DELETIONS)
    table.sends(*table.of_tenants(lambda tenant: f"$KV.{subjects.LEASES}.control.{tenant}.>"))
    table.sends(*table.of_tenants(lambda tenant: f"$KV.{subjects.DELETIONS}.{tenant}.*"))
    table.sends(*table.of_tenants(lambda tenant: f"tether.prompt.{tenant}.>"))
    table.sends("tether.agent.*")
    table.asks_sandboxes()
    table.hears(*table.of_tenants(lambda tenant: f"tether.live.{tenant}.>"))


def _operator(table: _Table) -> None:
    table.reads(*table.streams(subjects.events_stream))
    table.reads_buckets(subjects.OWNERS, subjects.REQUESTS, subjects.CONVERSATIONS)
    table.reads_buckets(subjects.SANDBOXES, subjects.CHECKPOINTS)
    table.sends(*table.of_tenants(lambda tenant: f"tether.prompt.{tenant}.>"))
    table.sends("tether.agent.*")
    table.hears(*table.of_tenants(lambda tenant: f"tether.live.{tenant}.>"))


def _observer(table: _Table) -> None:
    table.sends(f"{API}.STREAM.LIST", f"{API}.STREAM.NAMES", f"{API}.CONSUMER.LIST.*", f"{API}.CONSUMER.NAMES.*")
    table.sends(f"{API}.CONSUMER.INFO.*.*", "$SRV.>")
    table.reads(*table.all_streams())
    table.hears(*table.of_tenants(lambda tenant: f"tether.live.{tenant}.>"))


_FILL: Final[dict[Role, Callable[[_Table], None]]] = {
    "router": _router,
    "backend": _backend,
    "agent": _agent,
    "client": _client,
    "operator": _operator,
    "observer": _observer,
}


# --- sandboxes ---


@dataclass(frozen=True, slots=True)
class Use:
    """One thing that a sandbox does on the services' account. `subject` may be narrower for one user than for its
    workspace's account; `why` is for people."""

    name: str
    subject: str
    kind: str
    why: str


def _direct(bucket_or_stream: str, subject: str) -> str:
    return f"{API}.DIRECT.GET.{bucket_or_stream}.{subject}"


def _bucket_read(name: str, key: str) -> str:
    return _direct(f"KV_{name}", f"$KV.{name}.{key}")


def sandbox_uses(tenant: str, workspace: str, sandbox: str = "*") -> tuple[Use, ...]:
    """Everything that a workspace's sandboxes may do beyond their own account, and nothing else."""
    where = f"{check_token(tenant, 'tenant')}.{check_token(workspace, 'workspace')}"
    log, blobs = subjects.events_stream(tenant), subjects.blobs_stream(tenant)
    registration = f"{where}.{sandbox}"
    return (
        Use("events", f"tether.event.{where}.>", _SERVICE, "tell its own executions"),
        Use("events-last", _direct(log, f"tether.event.{where}.>"), _SERVICE, "see where the log of one stands"),
        Use("blobs", f"tether.blob.{where}.>", _SERVICE, "store large bodies and checkpoints"),
        Use("blobs-last", _direct(blobs, f"tether.blob.{where}.>"), _SERVICE, "read its own, part by part"),
        Use("registration", f"$KV.{subjects.SANDBOXES}.{registration}", _SERVICE, "say that it is there"),
        Use("registration-last", _bucket_read(subjects.SANDBOXES, registration), _SERVICE, "write it by revision"),
        Use("checkpoint", f"$KV.{subjects.CHECKPOINTS}.{where}", _SERVICE, "name its checkpoint"),
        Use("checkpoint-last", _bucket_read(subjects.CHECKPOINTS, where), _SERVICE, "read it"),
        Use("owner-last", _bucket_read(subjects.OWNERS, f"{where}.*"), _SERVICE, "see whose conversation it is"),
        Use("lease-last", _bucket_read(subjects.LEASES, f"control.{where}.*"), _SERVICE, "see who holds control"),
        Use("history", subjects.history(tenant, workspace), _SERVICE, "ask for the rows of a conversation"),
        Use("reply", subjects.replies_all(tenant, workspace), _SERVICE, "answer what it is asked"),
        Use("control", subjects.control_all(tenant, workspace), _STREAM, "hear what it is asked"),
    )


def sandbox(tenant: str, workspace: str, sandbox_id: str) -> Allowed:
    """The permissions of one sandbox's user, within its workspace's account."""
    inbox = f"{sandbox_inbox(tenant, workspace)}.>"
    uses = sandbox_uses(tenant, workspace, check_token(sandbox_id, "sandbox"))
    return Allowed(
        publish=(inbox, *(use.subject for use in uses if use.kind == _SERVICE)),
        subscribe=(inbox, *(use.subject for use in uses if use.kind == _STREAM)),
    )


def sandbox_imports(services_account: str, tenant: str, workspace: str) -> tuple[Import, ...]:
    """What the account of a workspace has of the services' account."""
    return tuple(Import(use.name, services_account, use.subject, use.kind) for use in sandbox_uses(tenant, workspace))


def exports() -> tuple[Export, ...]:
    """What the services' account offers to workspaces' accounts, whose imports (signed by the operator's key) say what
    each has of it."""
    read = tuple(
        Export(f"{name.removeprefix('tether_')}-last", _bucket_read(name, ">"), _SERVICE)
        for name in (subjects.SANDBOXES, *_CONTROL_KINDS)
    )
    return (
        Export("events", "tether.event.>", _SERVICE),
        Export("blobs", "tether.blob.>", _SERVICE),
        Export("streams-last", f"{API}.DIRECT.GET.*.tether.>", _SERVICE),
        Export("registrations", f"$KV.{subjects.SANDBOXES}.>", _SERVICE),
        Export("checkpoints", f"$KV.{subjects.CHECKPOINTS}.>", _SERVICE),
        *read,
        Export("history", "tether.history.>", _SERVICE),
        Export("reply", "tether.reply.>", _SERVICE),
        Export("control", "tether.control.>", _STREAM),
    )

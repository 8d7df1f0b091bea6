"""As each role, on a real server: every subject of the topology, of foreign tenants and workspaces, every management of
streams and consumers. What the server refuses is what the table says, and what no role may have nobody has."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path

import pytest

from support_permissions import Trust, of_sandbox, plain, renewed_nowhere, trusted_server
from tether import permissions, subjects, topology
from tether.nkey_jwt import Allowed
from tether.permissions import ROLES, Role

OWN, FOREIGN, MINE, OTHER = "acme", "rival", "w1", "w2"
TENANTS = [OWN]
BUCKETS = [name.removeprefix("KV_") for name in topology.names(topology.base()) if name.startswith("KV_")]
STREAMS = [
    *topology.names(topology.base()),
    *(stream for tenant in (OWN, FOREIGN) for stream in topology.names(topology.tenant(tenant))),
]
VERBS_OF_STREAMS = (
    *("INFO", "CREATE", "UPDATE", "DELETE", "PURGE", "MSG.GET", "MSG.DELETE", "SNAPSHOT", "RESTORE"),
    *("PEER.REMOVE", "LEADER.STEPDOWN"),
)
VERBS_OF_CONSUMERS = ("INFO", "CREATE", "DELETE", "MSG.NEXT", "DURABLE.CREATE", "PAUSE", "UNPIN", "RESET")
DURABLES = (subjects.ROUTER_DURABLE, subjects.AGENT_DURABLE, subjects.WEBHOOKS_DURABLE, "projection-db1-0", "mine")
INBOXES = [permissions.inbox_prefix(role) for role in (*ROLES, "cli")] + [
    "_INBOX",
    *(permissions.sandbox_inbox(*where) for where in product((OWN, FOREIGN), (MINE, OTHER))),
]


def _stored() -> list[str]:
    """A subject of every kind that a stream takes, for own and foreign tenants and workspaces."""
    found = []
    for tenant, workspace in product((OWN, FOREIGN), (MINE, OTHER)):
        where = f"{tenant}.{workspace}"
        found += [
            f"tether.prompt.{where}.c",
            f"tether.command.{where}",
            f"tether.event.{where}.c.e",
            f"tether.event.{where}.c._",
            f"tether.live.{where}.c.e",
            f"tether.quarantine.{where}.c.e",
            f"tether.blob.{where}.artifact.d.0",
            f"tether.blob.{where}.checkpoint.d.manifest",
            *(f"$KV.{bucket}.{key}" for bucket, key in product(BUCKETS, _keys(tenant, workspace))),
        ]
    return found


def _keys(tenant: str, workspace: str) -> list[str]:
    where = f"{tenant}.{workspace}"
    return [
        where,  # sandbox record, checkpoint; conversations and requests have an id in the place of the workspace
        f"{where}.c",
        f"{where}.{of_sandbox(OWN, MINE)}",
        f"control.{where}.c",
        f"projector.{tenant}.0",
        f"prompts.{tenant}",
        f"running.{tenant}",
    ]


def _asked() -> list[str]:
    found = [f"tether.agent.{verb}" for verb in ("suspend", "delete", "workspace")]
    for tenant, workspace in product((OWN, FOREIGN), (MINE, OTHER)):
        where = f"{tenant}.{workspace}"
        found += [f"tether.control.{where}.{verb}" for verb in ("stop", "answer", "start")]
        found += [f"tether.history.{where}", f"tether.reply.{where}.asker.1"]
    return found


def _api() -> list[str]:
    found = ["$JS.API.INFO", "$JS.API.STREAM.LIST", "$JS.API.STREAM.NAMES", "$JS.API.META.LEADER.STEPDOWN"]
    found += [f"$JS.API.STREAM.{verb}.{stream}" for verb, stream in product(VERBS_OF_STREAMS, (*STREAMS, "NEW"))]
    for stream in STREAMS:
        found += [
            f"$JS.API.CONSUMER.LIST.{stream}",
            f"$JS.API.CONSUMER.NAMES.{stream}",
            f"$JS.API.CONSUMER.CREATE.{stream}",
        ]
        found += [
            f"$JS.API.CONSUMER.{verb}.{stream}.{durable}" for verb, durable in product(VERBS_OF_CONSUMERS, DURABLES)
        ]
        found += [f"$JS.API.CONSUMER.CREATE.{stream}.mine.tether.event.>", f"$JS.API.DIRECT.GET.{stream}"]
        found += [f"$JS.ACK.{stream}.{durable}.1.1.1.1.1" for durable in DURABLES]
        found += [f"$JS.FC.{stream}.mine.x", f"$JS.SNAPSHOT.ACK.{stream}.x"]
    for subject in STORED:
        found += [f"$JS.API.DIRECT.GET.{stream}.{subject}" for stream in STREAMS if _takes(stream, subject)]
    return found


def _takes(stream: str, subject: str) -> bool:
    kind, _, tenant = stream.partition("_")
    places = {"EVENTS": "event", "BLOBS": "blob", "QUARANTINE": "quarantine"}
    if kind == "KV":
        return subject.startswith(f"$KV.{tenant}.")
    return kind in places and subject.startswith(f"tether.{places[kind]}.{tenant}.")


STORED = _stored()
SYSTEM = ["$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.SERVER.PING", "$SRV.PING", "$SRV.INFO.tether-agent"]
PUBLISH = [*STORED, *_asked(), *_api(), *SYSTEM, *(f"{inbox}.x.1" for inbox in INBOXES), "anything"]
SUBSCRIBE = [
    *STORED,
    *_asked(),
    *(f"{inbox}.{rest}" for inbox, rest in product(INBOXES, ("x.1", "x.*", ">"))),
    *("_INBOX.>", "_INBOX_*.>", ">", "*", "*.>", "tether.>", "$KV.>", "$JS.>", "$SYS.>", "tether.live.>"),
    *("tether.control.>", "tether.control.acme.>", "tether.reply.>", f"tether.control.{OWN}.{MINE}.>", *SYSTEM),
    *(f"tether.live.{tenant}.>" for tenant in (OWN, FOREIGN)),
    *("$JS.API.>", "$JS.API.STREAM.INFO.*", "$JS.ACK.>", "_R_.>", "tether.prompt.>", "tether.command.>"),
]


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trust]:
    with trusted_server(tmp_path_factory.mktemp("trust"), TENANTS) as made:
        yield made


@asynccontextmanager
async def a_sandbox(trust: Trust, state: Path, tenant: str = OWN, workspace: str = MINE) -> AsyncIterator[str]:
    """The credentials of one."""
    authority = trust.authority(state)
    async with authority.running(renewed_nowhere):
        yield await authority.admit(tenant, workspace, of_sandbox(tenant, workspace), boot="b1")


def _regex(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Of one's own making: the table's matcher is under test too."""
    told = [
        "^"
        + r"\.".join(r"[^.]+" if token == "*" else r".+" if token == ">" else re.escape(token) for token in tokens)
        + "$"
        for tokens in (pattern.split(".") for pattern in patterns)
    ]
    compiled = re.compile("|".join(told))
    return lambda subject: compiled.match(subject) is not None


def _within(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether everything that a subscription would get is allowed. Its wildcards stand for tokens that no pattern
    names; `>` for one and for several."""
    allows = _regex(patterns)

    def within(subject: str) -> bool:
        if subject.endswith(">") or subject == ">":
            head = subject[:-1]
            # Allowed only by a pattern that ends in `>` itself.
            return all(allows(f"{head.replace('*', '%')}{tail}") for tail in ("%", "%.%", "%.%.%.%.%.%.%.%.%"))
        return allows(subject.replace("*", "%"))

    return within


@pytest.mark.parametrize("role", ROLES)
async def test_a_service_may_do_what_the_table_says_and_nothing_else(trust: Trust, role: Role) -> None:
    table = permissions.service(role, TENANTS)
    async with plain(trust.server, trust.credentials(role)) as client:
        refused = await client.tried(PUBLISH, SUBSCRIBE)
    publish, subscribe = _regex(table.publish), _within(table.subscribe)
    assert refused.publish == {subject for subject in PUBLISH if not publish(subject)}
    assert refused.subscribe == {subject for subject in SUBSCRIBE if not subscribe(subject)}
    assert set(PUBLISH) - refused.publish, "a role that may do nothing"


async def test_a_sandbox_may_do_this_and_nothing_else(trust: Trust, tmp_path: Path) -> None:
    """Written out, not made from the table."""
    me = of_sandbox(OWN, MINE)
    publish = {
        "tether.event.acme.w1.c.e",
        "tether.event.acme.w1.c._",
        "tether.blob.acme.w1.artifact.d.0",
        "tether.blob.acme.w1.checkpoint.d.manifest",
        f"$KV.tether_sandboxes.acme.w1.{me}",
        "$KV.tether_checkpoints.acme.w1",
        "tether.history.acme.w1",
        "tether.reply.acme.w1.asker.1",
        "_INBOX_sandbox.acme.w1.x.1",
        "$JS.API.DIRECT.GET.EVENTS_acme.tether.event.acme.w1.c.e",
        "$JS.API.DIRECT.GET.EVENTS_acme.tether.event.acme.w1.c._",
        "$JS.API.DIRECT.GET.BLOBS_acme.tether.blob.acme.w1.artifact.d.0",
        "$JS.API.DIRECT.GET.BLOBS_acme.tether.blob.acme.w1.checkpoint.d.manifest",
        f"$JS.API.DIRECT.GET.KV_tether_sandboxes.$KV.tether_sandboxes.acme.w1.{me}",
        "$JS.API.DIRECT.GET.KV_tether_checkpoints.$KV.tether_checkpoints.acme.w1",
        "$JS.API.DIRECT.GET.KV_tether_owners.$KV.tether_owners.acme.w1.c",
        f"$JS.API.DIRECT.GET.KV_tether_owners.$KV.tether_owners.acme.w1.{me}",
        "$JS.API.DIRECT.GET.KV_tether_leases.$KV.tether_leases.control.acme.w1.c",
    }
    subscribe = {
        *(f"tether.control.acme.w1.{verb}" for verb in ("stop", "answer", "start", ">")),
        *(f"_INBOX_sandbox.acme.w1.{rest}" for rest in ("x.1", "x.*", ">")),
    }
    async with a_sandbox(trust, tmp_path) as credentials, plain(trust.server, credentials) as client:
        refused = await client.tried(PUBLISH, SUBSCRIBE)
    assert set(PUBLISH) - refused.publish == publish
    assert set(SUBSCRIBE) - refused.subscribe == subscribe
    table = permissions.sandbox(OWN, MINE, me)
    assert {subject for subject in PUBLISH if _regex(table.publish)(subject)} == publish


async def test_a_sandbox_answers_only_for_its_own_workspace_even_in_its_own_account(
    trust: Trust, tmp_path: Path
) -> None:
    """Two workspaces whose names could be taken for one another's."""
    near = ["tether.reply.acme.w11.a.1", "tether.reply.acm.ew1.a.1", "tether.event.acme.w.c.e"]
    async with a_sandbox(trust, tmp_path, "acme", "w1") as one, plain(trust.server, one) as client:
        assert (await client.tried(near, [])).publish == set(near)


def _who_may(subject: str, of: Callable[[Allowed], Sequence[str]] = lambda allowed: allowed.publish) -> set[Role]:
    return {role for role in ROLES if _regex(of(permissions.service(role, TENANTS)))(subject)}


def test_what_only_one_role_may_and_what_none_may() -> None:
    assert _who_may("$JS.API.STREAM.CREATE.EVENTS_acme") == {"router"}
    assert _who_may("$JS.API.STREAM.UPDATE.PROMPTS") == {"router"}
    assert _who_may("$KV.tether_owners.acme.w1.c") == {"router"}
    assert _who_may("$KV.tether_requests.acme.r") == {"router"}
    assert _who_may("tether.command.acme.w1") == {"router"}
    assert _who_may("$JS.API.CONSUMER.MSG.NEXT.PROMPTS.router") == {"router"}
    assert _who_may("$JS.API.CONSUMER.MSG.NEXT.COMMANDS.agent-service") == {"agent"}
    assert _who_may("$KV.tether_sandboxes.acme.w1") == {"agent"}
    assert _who_may("$KV.tether_leases.control.acme.w1.c") == {"backend", "client", "router"}
    assert _who_may("tether.event.acme.w1.c.e") == {"agent"}
    assert _who_may("tether.event.acme.w1.c._") == {"agent", "router", "backend"}
    assert _who_may("tether.agent.suspend") == {"backend", "client", "operator"}
    for stream in STREAMS:
        for verb in ("DELETE", "SNAPSHOT", "RESTORE", "PEER.REMOVE"):
            assert not _who_may(f"$JS.API.STREAM.{verb}.{stream}"), (stream, verb)
        for verb in ("MSG.DELETE", "PURGE"):
            assert _who_may(f"$JS.API.STREAM.{verb}.{stream}") <= {"router"}, (stream, verb)
    assert not _who_may("$JS.API.STREAM.PURGE.EVENTS_acme")
    for role in ROLES:
        hears = _regex(permissions.service(role, TENANTS).subscribe)
        assert [inbox for inbox in INBOXES if hears(f"{inbox}.x")] == [permissions.inbox_prefix(role)]
        assert hears(f"tether.live.{FOREIGN}.w1.c.e") == (role == "router")


def test_an_observer_changes_nothing() -> None:
    for pattern in permissions.service("observer", TENANTS).publish:
        reads = (".INFO", ".LIST", ".NAMES", ".GET.")
        own = pattern in ("_INBOX_observer.>", "$SRV.>")
        assert own or (pattern.startswith("$JS.API.") and any(part in pattern for part in reads)), pattern
        assert not any(verb in pattern for verb in ("CREATE", "UPDATE", "DELETE", "PURGE")), pattern


def test_many_tenants_are_not_named_one_by_one() -> None:
    many = [f"t{number}" for number in range(permissions.TENANTS_NAMED_MAX + 1)]
    for role in ROLES:
        table = permissions.service(role, many)
        assert len(table.publish) + len(table.subscribe) < 150
        one = permissions.service(role, TENANTS)
        allows = _regex(table.publish)
        within = _regex(one.publish)
        named = [subject for subject in PUBLISH[::7] if within(subject)]
        assert all(allows(subject) for subject in named)

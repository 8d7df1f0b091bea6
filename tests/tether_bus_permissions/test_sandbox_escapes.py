"""What a sandbox could try beyond its subjects: answers sent elsewhere, tokens that it saw, made-up credentials."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_permissions import Trust, of_sandbox, plain, renewed_nowhere, trusted_server, user
from tether import nkey_jwt, subjects, topology
from tether.bus import NatsBus, connect
from tether.errors import NoReplyError, PermissionDeniedError
from tether.nkey_jwt import Kind
from tether.ports import Message, StoredMessage

FORGED = b'{"forged":true}'
LOG = subjects.events_stream("acme")
VICTIM = subjects.event("acme", "w2", "c", "e")
MINE = subjects.event("acme", "w1", "c", "e")


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trust]:
    with trusted_server(tmp_path_factory.mktemp("trust"), ["acme"]) as made:
        yield made


async def prepared(person: NatsBus) -> None:
    await person.ensure(topology.base())
    await person.ensure(topology.tenant("acme", max_bytes=16 << 20))


async def everything(person: NatsBus) -> dict[str, list[StoredMessage]]:
    """What all streams hold, but for what the attacker may write itself."""
    found = {}
    for stream in (*topology.names(topology.base()), *topology.names(topology.tenant("acme"))):
        messages = await person.read(stream, 0, ">")
        found[stream] = [each for each in messages if not each.subject.startswith("tether.event.acme.w1.")]
    return found


@pytest.mark.parametrize("confined", [True, False])
async def test_an_answer_that_is_sent_to_anothers_subject_arrives_nowhere(
    trust: Trust, tmp_path: Path, confined: bool
) -> None:
    """The server answers a direct get, a publish and a request where the asker says. For a user of the services'
    account, however confined, that is a way to write anything anywhere: the reason for accounts of workspaces."""
    authority = trust.authority(tmp_path)
    async with trust.person() as person, authority.running(renewed_nowhere):
        await prepared(person)
        credentials = await authority.admit("acme", "w1", of_sandbox("acme", "w1"), boot="b1")
        if not confined:
            allowed = nkey_jwt.Allowed((MINE, f"$JS.API.DIRECT.GET.{LOG}.{MINE}"), ("_INBOX_me.>",))
            credentials = user(trust.keys.services, allowed=allowed)
        await person.publish(VICTIM, b"honest")
        before = await everything(person)
        targets = [
            VICTIM,
            "$KV.tether_owners.acme.w2.c",
            "$KV.tether_leases.control.acme.w2.c",
            subjects.prompt("acme", "w2", "c"),
            subjects.command("acme", "w1"),
            subjects.blob("acme", "w2", "artifact", "d", 0),
        ]
        overheard = [await person.subscribe(subject) for subject in ("tether.control.>", "_INBOX_router.>")]
        await person.barrier()
        async with plain(trust.server, credentials) as attacker:
            attacker.publish(MINE, FORGED)
            await attacker.refused()
            for target in (*targets, "tether.control.acme.w2.stop", "_INBOX_router.x.1"):
                attacker.publish(f"$JS.API.DIRECT.GET.{LOG}.{MINE}", b"", reply=target)
                attacker.publish(MINE, FORGED, reply=target)
            attacker.publish(MINE, FORGED, reply=f"$JS.API.STREAM.PURGE.{LOG}")
            assert not (await attacker.refused()).publish
            last = await stored(person, MINE, 2 + len(targets) + 2)
        assert last.data == FORGED
        await person.barrier()
        if not confined:
            record = await person.last("KV_tether_owners", "$KV.tether_owners.acme.w2.c")
            assert record is not None, "then accounts of workspaces would not be needed"
            await person.purge("KV_tether_owners", ">")
            for stream in topology.names(topology.tenant("acme")):
                await person.purge(stream, ">")
            for stream in ("KV_tether_leases", "PROMPTS", "COMMANDS"):
                await person.purge(stream, ">")
            return
        assert await everything(person) == before
        assert [await heard.next(0.05) for heard in overheard] == [None, None]


async def stored(person: NatsBus, subject: str, count: int) -> StoredMessage:
    """Its last message, once there are so many of it."""
    async with asyncio.timeout(30):
        while (await person.subjects(LOG, subject)).get(subject, 0) < count:  # noqa: ASYNC110 - the server stores
            await asyncio.sleep(0.01)
    last = await person.last(LOG, subject)
    assert last is not None
    return last


async def test_a_sandbox_does_its_work_and_answers_what_it_is_asked(trust: Trust, tmp_path: Path) -> None:
    authority = trust.authority(tmp_path)
    me = of_sandbox("acme", "w1")

    async def answer(message: Message) -> bytes:
        return b"for " + message.data

    async with trust.person() as person, authority.running(renewed_nowhere):
        await prepared(person)
        await authority.admit("acme", "w1", me, boot="b1")
        creds = str(authority.file("acme", "w1"))
        async with await connect(trust.server.url, name="sandbox", creds_file=creds) as bus:
            ack = await bus.publish(MINE, b"1", msg_id="m1")
            assert (await bus.publish(MINE, b"1", msg_id="m1")).duplicate
            found = await bus.last(LOG, MINE, leader=False)
            assert found is not None and found.sequence == ack.sequence
            key = f"$KV.tether_sandboxes.acme.w1.{me}"
            revision = (await bus.publish(key, b"{}", expect_last=0, ttl_s=30)).sequence
            await bus.publish(key, b"{}", expect_last=revision, ttl_s=30)
            assert await bus.last("KV_tether_owners", "$KV.tether_owners.acme.w1.c", leader=False) is None
            async with (
                person.serve("tether.history.acme.*", answer, name="history"),
                bus.serve("tether.control.acme.w1.*", answer, name="tether-collector"),
            ):
                assert (await bus.request("tether.history.acme.w1", b"rows", timeout_s=30)).data == b"for rows"
                asked = await person.request("tether.control.acme.w1.discover", b"you", timeout_s=30)
                assert asked.data == b"for you"
            await bus.barrier()
            with pytest.raises(NoReplyError) as nobody:
                await person.request("tether.control.acme.w1.discover", b"you", timeout_s=30)
            assert nobody.value.no_responders
            with pytest.raises(PermissionDeniedError):
                await bus.read(LOG, 0, MINE)
            assert bus.epoch == 1


async def test_an_answer_under_a_token_that_a_sandbox_saw_counts_only_for_its_own_workspace(
    trust: Trust, tmp_path: Path
) -> None:
    """It is asked, learns who asks and the number of the question, and answers the next ones, to the other workspace,
    before that one does."""
    authority = trust.authority(tmp_path)
    async with trust.person() as person, authority.running(renewed_nowhere):
        await prepared(person)
        spy = await authority.admit("acme", "w1", of_sandbox("acme", "w1"), boot="b1")
        await authority.admit("acme", "w2", of_sandbox("acme", "w2"), boot="b1")
        honest = str(authority.file("acme", "w2"))
        async with (
            plain(trust.server, spy) as attacker,
            await connect(trust.server.url, name="o", creds_file=honest) as other,
        ):
            heard: list[str] = []

            async def answer(message: Message) -> bytes:
                asker, _, number = message.reply.removeprefix("tether.reply.acme.w2.").partition(".")
                heard.append(asker)
                for place in ("w1", "w2"):
                    attacker.publish(f"tether.reply.acme.{place}.{asker}.{number}", b"forged")
                refused = await attacker.refused()
                assert refused.publish == {f"tether.reply.acme.w2.{asker}.{number}"}
                await person.barrier()
                return b"honest"

            async with other.serve("tether.control.acme.w2.*", answer, name="tether-collector"):
                reply = await person.request("tether.control.acme.w2.discover", b"", timeout_s=30)
        assert heard and reply.data == b"honest"


async def test_credentials_that_were_made_up_are_refused(trust: Trust, tmp_path: Path) -> None:
    authority = trust.authority(tmp_path)
    async with authority.running(renewed_nowhere):
        text = await authority.admit("acme", "w1", of_sandbox("acme", "w1"), boot="b1")
        claims, key = nkey_jwt.read_credentials(text)
        stranger = nkey_jwt.new_key(Kind.ACCOUNT)
        changed = claims.replace(claims.split(".")[1], _widened(claims), 1)
        own_account = nkey_jwt.read_claims(claims)["iss"]
        attempts = {
            "of an account that nobody knows": user(stranger),
            "changed after it was signed": nkey_jwt.credentials(changed, key),
            "another's key under these claims": nkey_jwt.credentials(claims, nkey_jwt.new_key(Kind.USER)),
            "signed for the account by a key that is not its": user(stranger, scoped_by=own_account),
            "signed for the services by a key that is not theirs": user(stranger, scoped_by=trust.keys.services.public),
            "of claims that are over": user(trust.keys.services, expires_s=int(time.time()) - 5),
        }
        for what, credentials in attempts.items():
            with pytest.raises(ConnectionError):
                async with plain(trust.server, credentials):
                    pytest.fail(f"credentials {what} were believed")
        async with plain(trust.server, text):
            pass


def _widened(claims: str) -> str:
    import base64

    body = nkey_jwt.read_claims(claims)
    body["nats"]["pub"] = {"allow": [">"]}
    return base64.urlsafe_b64encode(json.dumps(body).encode()).rstrip(b"=").decode()

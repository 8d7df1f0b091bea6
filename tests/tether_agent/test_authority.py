"""Credentials of sandboxes over their life: given out, renewed, revoked; agent services and servers that restart."""

from __future__ import annotations

import asyncio
import contextlib
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_permissions import Trust, of_sandbox, plain, renewed_nowhere, trusted_server
from tether import nkey_jwt
from tether.bus import connect
from tether.errors import PermissionDeniedError
from tether.nkey_jwt import Kind
from tether.settings import ConfigurationError
from tether_agent import authority as authorities
from tether_agent.authority import AuthorityAwayError

ME = of_sandbox("acme", "w1")
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trust]:
    with trusted_server(tmp_path_factory.mktemp("trust"), ["acme"]) as made:
        yield made


async def believed(trust: Trust, credentials: str) -> bool:
    try:
        async with plain(trust.server, credentials):
            return True
    except ConnectionError:
        return False


async def gone(path: Path) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await asyncio.to_thread(path.exists):  # noqa: ASYNC110 - written by another task
            await asyncio.sleep(0.01)


async def test_revoked_credentials_are_cut_and_refused_and_new_ones_are_not(trust: Trust, tmp_path: Path) -> None:
    """At once after one another: a revocation covers a second, and what is given out within it is not covered."""
    authority = trust.authority(tmp_path)
    file = authority.file("acme", "w1")
    async with authority.running(renewed_nowhere):
        stolen: list[str] = []
        for boot in ("b1", "b2", "b3"):
            stolen.append(await authority.admit("acme", "w1", ME, boot=boot))
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            async with plain(trust.server, stolen[-1]) as running:
                authority.revoke("acme", "w1")
                await gone(file)
                with pytest.raises(ConnectionError):
                    async with asyncio.timeout(DEADLINE_S):
                        while True:
                            await running.refused()
            assert not any([await believed(trust, each) for each in stolen])
        now = await authority.admit("acme", "w1", ME, boot="b4")
        assert await believed(trust, now)
    assert not any([await believed(trust, each) for each in stolen])


async def test_another_workspace_is_not_touched_by_a_revocation(trust: Trust, tmp_path: Path) -> None:
    authority = trust.authority(tmp_path)
    async with authority.running(renewed_nowhere):
        await authority.admit("acme", "one", of_sandbox("acme", "one"), boot="b")
        other = await authority.admit("acme", "two", of_sandbox("acme", "two"), boot="b")
        async with plain(trust.server, other) as running:
            authority.revoke("acme", "one")
            await gone(authority.file("acme", "one"))
            assert not (await running.tried(["tether.event.acme.two.c.e"], [])).publish


async def test_a_later_boot_ends_the_credentials_of_the_one_before_and_the_same_boot_keeps_them(
    trust: Trust, tmp_path: Path
) -> None:
    authority = trust.authority(tmp_path)
    async with authority.running(renewed_nowhere):
        first = await authority.admit("acme", "w3", of_sandbox("acme", "w3"), boot="b1")
        assert await authority.admit("acme", "w3", of_sandbox("acme", "w3"), boot="b1") == first
        second = await authority.admit("acme", "w3", of_sandbox("acme", "w3"), boot="b2")
        assert await believed(trust, second)
        assert not await believed(trust, first)


async def test_a_collector_goes_on_over_the_end_of_its_claims(trust: Trust, tmp_path: Path) -> None:
    """They are renewed in its file, which it reads when the server closes the connection for the old ones' end."""
    authority = trust.authority(tmp_path, agent_credentials_life_s=3.0)
    handed: list[str] = []

    async def renewed(tenant: str, workspace: str, credentials: str) -> None:
        handed.append(credentials)

    async with authority.running(renewed):
        first = await authority.admit("acme", "w4", of_sandbox("acme", "w4"), boot="b1")
        ends_s = nkey_jwt.read_claims(nkey_jwt.read_credentials(first)[0])["exp"]
        file = authority.file("acme", "w4")
        async with await connect(trust.server.url, name="sandbox", creds_file=str(file)) as bus:
            assert bus.config.inbox_prefix == "_INBOX_sandbox.acme.w4"
            async with asyncio.timeout(DEADLINE_S):
                while bus.epoch == 1 or not bus.connected:  # noqa: ASYNC110 - the server decides
                    await asyncio.sleep(0.05)
            assert time.time() >= ends_s - 1
            await bus.barrier()
        claims, key = nkey_jwt.read_credentials(handed[-1])
        assert key == nkey_jwt.read_credentials(first)[1]
        assert nkey_jwt.read_claims(claims)["exp"] > ends_s
        async with asyncio.timeout(DEADLINE_S):  # their last second is over
            while await believed(trust, first):  # noqa: ASYNC110 - a server's condition
                await asyncio.sleep(0.1)


async def test_what_ended_while_no_agent_service_ran_is_revoked_by_the_next(trust: Trust, tmp_path: Path) -> None:
    first = trust.authority(tmp_path)
    async with first.running(renewed_nowhere):
        ended = await first.admit("acme", "w5", of_sandbox("acme", "w5"), boot="b1")
        living = await first.admit("acme", "w6", of_sandbox("acme", "w6"), boot="b1")
    second = trust.authority(tmp_path)
    async with second.running(renewed_nowhere):
        second.revoke_all_but([("acme", "w6")])
        await gone(second.file("acme", "w5"))
        assert await believed(trust, living) and not await believed(trust, ended)


async def test_a_revocation_waits_for_servers_that_are_away_and_outlives_their_restart(tmp_path: Path) -> None:
    with trusted_server(tmp_path / "trust", ["acme"]) as trust:
        authority = trust.authority(tmp_path / "state")
        async with authority.running(renewed_nowhere):
            stolen = await authority.admit("acme", "w1", ME, boot="b1")
            trust.server.kill()
            authority.revoke("acme", "w1")
            trust.server.start()
            await gone(authority.file("acme", "w1"))
        trust.server.restart()
        assert not await believed(trust, stolen)
        again = trust.authority(tmp_path / "state")
        async with again.running(renewed_nowhere):
            assert await believed(trust, await again.admit("acme", "w1", ME, boot="b2"))
            assert not await believed(trust, stolen)


async def test_without_servers_nobody_is_admitted_anew_and_who_is_stays_so(
    trust: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trust.authority(tmp_path)
    monkeypatch.setattr(authorities, "ANSWER_S", 0.2)
    async with authority.running(renewed_nowhere):
        known = await authority.admit("acme", "w7", of_sandbox("acme", "w7"), boot="b1")
        trust.server.stop()
        try:
            assert await authority.admit("acme", "w7", of_sandbox("acme", "w7"), boot="b1") == known
            with pytest.raises(AuthorityAwayError):
                await authority.admit("acme", "w8", of_sandbox("acme", "w8"), boot="b1")
        finally:
            trust.server.cont()
    assert not authority.file("acme", "w8").exists()


def test_settings_that_do_not_fit_are_refused_by_name(trust: Trust, tmp_path: Path) -> None:
    settings = trust.settings(tmp_path)
    with pytest.raises(ConfigurationError, match="TETHER_AGENT_AUTHORITY_ACCOUNT: is needed too"):
        authorities.of(settings.model_copy(update={"agent_authority_account": None}))
    nothing = dict.fromkeys(("agent_authority_account", "agent_authority_key_file", "agent_authority_creds_file"))
    assert authorities.of(settings.model_copy(update=nothing)) is None
    key = tmp_path / "key"
    for text, said in (
        (nkey_jwt.new_key(Kind.ACCOUNT).seed, "signing key of the operator"),
        ("nonsense", "no seed"),
        ("", "no seed"),
    ):
        key.write_text(text)
        key.chmod(0o600)
        with pytest.raises(ConfigurationError, match=said) as refused:
            authorities.of(settings.model_copy(update={"agent_authority_key_file": key}))
        assert not text or text not in str(refused.value)
    key.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        authorities.of(settings.model_copy(update={"agent_authority_key_file": key}))


async def test_the_agent_services_own_user_of_the_system_account_may_do_nothing_else(trust: Trust) -> None:
    credentials = trust.keys.creds_file("authority").read_text()
    tried = ["$SYS.REQ.SERVER.PING", "$SYS.REQ.CLAIMS.DELETE", "$SYS.REQ.CLAIMS.LIST", "$SYS.REQ.SERVER.X.RELOAD"]
    async with plain(trust.server, credentials) as client:
        assert (await client.tried(tried, ["$SYS.>", "$SYS.ACCOUNT.>"])).publish == set(tried)
    with contextlib.suppress(PermissionDeniedError):
        async with await connect(trust.server.url, name="x", creds_file=str(trust.keys.creds_file("authority"))) as bus:
            assert bus.config.inbox_prefix == "_INBOX_authority"

"""Webhooks: once per event whatever is restarted, repeated until taken, dead ones visible and put back."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support_backend import Log, ensure_tenants, event, eventually, running_backend
from support_nats import running_server
from support_webhooks import Receiver, receiving, working
from tether import subjects
from tether.bus import NatsBus, connect
from tether.limits import WEBHOOK_BACKOFF_S
from tether.settings import ConfigurationError
from tether_backend.core.notices import Notice, Notification, attempted, revived, signature
from tether_backend.metrics import Metrics
from tether_backend.webhooks.config import Endpoint, load_endpoints
from tether_backend.webhooks.deliverer import Deliverer
from tether_backend.webhooks.service import Webhooks

TENANT = "t1"
SECRET = b"0123456789abcdef01234567"


def endpoint(receiver: Receiver, *kinds: Any, name: str = "chat") -> Endpoint:
    every = kinds or ("interaction.requested", "response.ended")
    return Endpoint(name, TENANT, frozenset(every), receiver.url, SECRET)


@pytest.fixture
async def log(bus: NatsBus) -> Log:
    tenant = f"t{time.monotonic_ns()}"
    await ensure_tenants(bus, [tenant])
    return Log(bus, tenant, "c1", "w")


def hooks_of(log: Log, endpoints: Sequence[Endpoint], **more: Any) -> Webhooks:
    return Webhooks(log.bus, log.tenant, endpoints, Metrics(), **more)


ASKED = event(2, "interaction.requested", {"interaction": "i1", "kind": "approval", "name": "Bash", "input": {"a": 1}})
ENDED = event(3, "response.ended", {"outcome": "failed", "error": {"code": "model_auth", "detail": "401"}})
STARTED = event(1, "session.bound", {"native_session": "s", "resumable": False})


async def delivered(receiver: Receiver, count: int) -> None:
    async def there() -> bool:
        return len(receiver.bodies) >= count

    await eventually(there, f"{count} deliveries")


async def settled(hooks: Webhooks, state: str, count: int = 1) -> list[Notification]:
    async def there() -> list[Notification] | None:
        found = [note async for _, note in hooks.outbox.written_after(0) if note.state == state]
        return found if len(found) >= count else None

    found: list[Notification] = await eventually(there, f"{count} {state}")
    return found


async def test_what_waits_and_what_ended_is_told_signed_and_once(log: Log) -> None:
    async with receiving() as receiver:
        hooks = hooks_of(log, [endpoint(receiver)])
        async with working(hooks):
            await log.frame("e1", [STARTED, ASKED])
            await log.frame("e1", [ENDED])
            await delivered(receiver, 2)
            await settled(hooks, "delivered", 2)
        assert [json.loads(body)["type"] for body in receiver.bodies] == ["interaction.requested", "response.ended"]
        asked, ended = receiver.data(0)["data"], receiver.data(1)["data"]
        assert (asked["conversation"], asked["execution"], asked["interaction"]) == ("c1", "e1", "i1")
        assert "input" not in asked, "what a tool would do may be secret: it is read from the API"
        assert ended["outcome"] == "failed" and ended["error"]["code"] == "model_auth"
        for headers, body in zip(receiver.headers, receiver.bodies, strict=True):
            signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
            mac = base64.b64encode(hmac.digest(SECRET, signed, "sha256")).decode()
            assert headers["webhook-signature"] == f"v1,{mac}"


async def test_an_endpoint_gets_only_the_kinds_that_it_wants(log: Log) -> None:
    async with receiving() as receiver:
        hooks = hooks_of(log, [endpoint(receiver, "response.ended")])
        async with working(hooks):
            await log.frame("e1", [STARTED, ASKED, ENDED])
            await settled(hooks, "delivered")
        assert [json.loads(body)["type"] for body in receiver.bodies] == ["response.ended"]


async def test_a_response_that_failed_before_it_began_is_told_as_ended(log: Log) -> None:
    async with receiving() as receiver:
        hooks = hooks_of(log, [endpoint(receiver)])
        async with working(hooks):
            body = {"request": "q1", "response": "r1", "code": "AGENT_START_FAILED", "detail": "no such command"}
            await log.note("response.failed", "q1/response.failed", body)
            await delivered(receiver, 1)
        data = receiver.data()["data"]
        assert (data["outcome"], data["request"], data["error"]["code"]) == ("failed", "q1", "AGENT_START_FAILED")


async def test_a_deleted_consumer_and_another_process_notify_nothing_again(log: Log) -> None:
    async with receiving() as receiver:
        first = hooks_of(log, [endpoint(receiver)])
        async with working(first):
            await log.frame("e1", [STARTED, ASKED])
            await settled(first, "delivered")
        await log.bus.delete_consumer(subjects.events_stream(log.tenant), subjects.WEBHOOKS_DURABLE)
        second = hooks_of(log, [endpoint(receiver)])
        async with working(second):
            await log.frame("e1", [ENDED])
            await settled(second, "delivered", 2)
        assert len(receiver.ids) == len(set(receiver.ids)) == 2


async def test_a_process_killed_between_record_and_ack_notifies_once(log: Log) -> None:
    class Killed(BaseException):
        pass

    def step(_: str) -> None:
        raise Killed

    async with receiving() as receiver:
        dying = hooks_of(log, [endpoint(receiver)], step=step)
        work = asyncio.create_task(dying.work(), name="dying")
        await log.frame("e1", [STARTED, ASKED])
        with contextlib.suppress(Killed, BaseExceptionGroup):
            await work
        hooks = hooks_of(log, [endpoint(receiver)])
        async with working(hooks):
            await settled(hooks, "delivered")
            await log.frame("e1", [ENDED])
            await settled(hooks, "delivered", 2)
        assert len(set(receiver.ids)) == 2


async def test_a_receiver_that_refuses_gets_it_again_under_the_same_id_with_the_same_bytes(log: Log) -> None:
    async with receiving(503, 500, 204) as receiver:
        hooks = hooks_of(log, [endpoint(receiver)])
        await log.frame("e1", [STARTED, ASKED])
        clock = [time.time_ns() // 1_000_000]
        async with working(hooks):
            await delivered(receiver, 1)
        async with httpx2.AsyncClient(follow_redirects=False) as client:
            deliverer = Deliverer(hooks.outbox, hooks.endpoints, client, Metrics(), now_ms=lambda: clock[0])
            for _ in range(2):
                clock[0] += 60_000
                await deliverer._pass()
        (note,) = await settled(hooks, "delivered")
        assert note.attempts == 3 and note.error is None
        assert len(set(receiver.ids)) == 1 and len(set(receiver.bodies)) == 1


async def test_what_nobody_takes_is_dead_visible_and_can_be_put_back(log: Log, tmp_path: Path) -> None:
    async with receiving(301) as receiver, running_backend(log.bus, [log.tenant], tmp_path) as backend:
        hooks = hooks_of(log, [endpoint(receiver)])
        await log.frame("e1", [STARTED, ASKED])
        clock = [time.time_ns() // 1_000_000]
        async with working(hooks):
            await delivered(receiver, 1)
        async with httpx2.AsyncClient(follow_redirects=False) as client:
            deliverer = Deliverer(hooks.outbox, hooks.endpoints, client, Metrics(), now_ms=lambda: clock[0])
            for _ in range(len(WEBHOOK_BACKOFF_S) + 3):
                clock[0] += 24 * 3600 * 1000
                await deliverer._pass()
            (dead,) = await settled(hooks, "dead")
            assert dead.attempts == len(WEBHOOK_BACKOFF_S) + 1 and dead.status == 301
            listed = (await backend.client.get("/v1/webhooks/deliveries", params={"state": "dead"})).json()
            assert [one["id"] for one in listed["deliveries"]] == [dead.id]
            assert "do-not-show" not in json.dumps(listed)
            receiver.statuses = [200]
            path = f"/v1/webhooks/deliveries/chat/{dead.id}/retry"
            assert (await backend.client.post(path)).json()["state"] == "pending"
            await deliverer._pass()
            assert (await backend.client.post(path)).json()["state"] == "delivered", "a delivered one stays delivered"
        missing = await backend.client.post("/v1/webhooks/deliveries/chat/ntf_none/retry")
        assert missing.status_code == 404


async def test_a_receiver_that_is_not_there_holds_up_nobody_else(log: Log) -> None:
    async with receiving() as receiver:
        gone = Endpoint("gone", TENANT, frozenset(("interaction.requested",)), "http://127.0.0.1:9/x", SECRET)
        hooks = hooks_of(log, [gone, endpoint(receiver)])
        async with working(hooks):
            await log.frame("e1", [STARTED, ASKED])
            await settled(hooks, "delivered")

            async def tried() -> bool:
                return any(
                    [note.attempts async for _, note in hooks.outbox.written_after(0) if note.endpoint == "gone"]
                )

            await eventually(tried, "an attempt at the other one")


async def test_of_two_processes_one_delivers_and_the_other_takes_over(log: Log) -> None:
    async with receiving() as receiver:
        first, second = hooks_of(log, [endpoint(receiver)]), hooks_of(log, [endpoint(receiver)])
        async with working(second):
            async with working(first):
                await log.frame("e1", [STARTED, ASKED])
                await settled(first, "delivered")
            await log.frame("e1", [ENDED])
            await settled(second, "delivered", 2)
        assert len(receiver.ids) == len(set(receiver.ids)) == 2


def test_an_attempt_after_the_last_back_off_is_the_last() -> None:
    note = Notification(id="n", endpoint="e", kind="response.ended", conversation="c", body="{}")
    for number in range(len(WEBHOOK_BACKOFF_S)):
        note = attempted(note, now_ms=1000, status=500, error="no", retry_after_s=None)
        assert (note.state, note.due_at) == ("pending", 1000 + WEBHOOK_BACKOFF_S[number] * 1000)
    note = attempted(note, now_ms=1000, status=None, error="no answer", retry_after_s=None)
    assert note.state == "dead"
    assert revived(note, 5).state == "pending"


def test_what_a_receiver_asks_for_is_waited_for_within_bounds() -> None:
    note = Notification(id="n", endpoint="e", kind="response.ended", conversation="c", body="{}")
    assert attempted(note, now_ms=0, status=429, error="", retry_after_s=90.0).due_at == 90_000
    assert attempted(note, now_ms=0, status=429, error="", retry_after_s=1e9).due_at == 3_600_000
    assert attempted(note, now_ms=0, status=429, error="", retry_after_s=-5.0).due_at == 1000


def test_the_signature_is_the_specifications() -> None:
    """The example of the Standard Webhooks specification."""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    given = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert given == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "ftp://x"}, "url"),
        ({"url": "https://user:pw@x/"}, "url"),
        ({"secret": "hunter2"}, "secret"),
        ({"secret": "whsec_c2hvcnQ="}, "secret"),
        ({"tenant": "other"}, "tenant"),
        ({"kinds": ["everything"]}, "kinds"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_wrong_file_is_refused_by_field_and_shows_no_secret(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "hooks.json"
    good = {
        "name": "chat",
        "url": "https://example.org/hook",
        "secret": "whsec_" + base64.b64encode(SECRET).decode(),
        "tenant": TENANT,
    }
    path.write_text(json.dumps([good]))
    path.chmod(0o600)
    assert load_endpoints(path, (TENANT,))[0].kinds == {"interaction.requested", "response.ended"}
    path.write_text(json.dumps([{**good, **change}]))
    with pytest.raises(ConfigurationError) as refused:
        load_endpoints(path, (TENANT,))
    assert said in str(refused.value)
    assert "hunter2" not in str(refused.value) and "pw@" not in str(refused.value)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hooks.json"
    path.write_text("[]")
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        load_endpoints(path, (TENANT,))


# --- receivers that answer anything, an outbox and a log with anything in them ---


@contextlib.asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[str]:
    """A server that says just this and closes; None: it never says anything."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    finally:
        server.close()


def at(url: str, name: str = "chat") -> Endpoint:
    return Endpoint(name, TENANT, frozenset(("interaction.requested", "response.ended")), url, SECRET)


async def attempt(log: Log, hooks: Webhooks) -> Notification:
    """The notification after its first attempt, by a process that has not ended."""
    async with working(hooks):
        await log.frame("e1", [STARTED, ASKED])

        async def tried() -> Notification | None:
            return next(iter([note async for _, note in hooks.outbox.written_after(0) if note.attempts]), None)

        found: Notification = await eventually(tried, "an attempt", timeout_s=10)
        return found


@pytest.mark.parametrize(
    "header",
    [
        b"Retry-After: \xb2",
        b"Retry-After: Mon, 01 Jan 99999999999999999999999 00:00:00 GMT",
        b"Retry-After: Mon, 01 Jan 2024 00:00:00 +99999999999999999999",
        b"Retry-After: ,,, ; 1 : 2",
        b"Retry-After: -1",
        b"Retry-After: " + b"9" * 5000,
        b"X-Long: " + b"a" * 300_000,
    ],
)
async def test_whatever_a_receiver_says_costs_one_attempt_and_not_the_process(log: Log, header: bytes) -> None:
    async with answering(b"HTTP/1.1 503 x\r\n%s\r\nContent-Length: 0\r\n\r\n" % header) as url:
        note = await attempt(log, hooks_of(log, [at(url)]))
        assert (note.state, note.attempts) == ("pending", 1)
        assert note.due_at - note.created_at < 3_700_000


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/x", "http://127.0.0.1:9/\x01", "http://127.0.0.1:9/\ud800"])
async def test_an_address_that_cannot_be_connected_to_costs_its_attempts_and_not_the_process(
    log: Log, url: str
) -> None:
    note = await attempt(log, hooks_of(log, [at(url)]))
    assert (note.state, note.status) == ("pending", None)


async def test_a_receiver_that_took_it_and_broke_off_has_taken_it(log: Log) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\nabc") as url:
        note = await attempt(log, hooks_of(log, [at(url)]))
        assert (note.state, note.status) == ("delivered", 200)


async def test_a_receiver_that_hangs_with_a_queue_before_it_holds_up_nobody_else(log: Log) -> None:
    async with answering(None) as url, receiving() as receiver:
        hooks = hooks_of(log, [at(url, "hangs"), endpoint(receiver)])
        for number in range(20):
            await Log(log.bus, log.tenant, f"c{number}", "w").frame(f"x{number}", [STARTED, ASKED])
        began_s = time.monotonic()
        async with working(hooks):
            await delivered(receiver, 20)
            await log.frame("e1", [STARTED, ASKED])
            await delivered(receiver, 21)
        assert time.monotonic() - began_s < 8, "the one that hangs is given 10 s"


async def test_what_is_no_record_in_the_outbox_and_no_message_in_the_log_is_passed_over(log: Log) -> None:
    async with receiving() as receiver:
        hooks = hooks_of(log, [endpoint(receiver)])
        where = f"$KV.{subjects.NOTIFICATIONS}.{log.tenant}.chat"
        record = '{"id":"%s","endpoint":"chat","kind":"response.ended","conversation":"c","body":"%s"}'
        await log.bus.publish(f"{where}.ntf_a", b"rubbish")
        await log.bus.publish(f"{where}.ntf_b", (record % ("a.b.>", "x")).encode())
        await log.bus.publish(f"{where}.ntf_c", (record % ("another", "x")).encode())
        await log.bus.publish(f"{where}.ntf_d", (record % ("ntf_d", "\\ud800")).encode())
        for subject in ("x", "a.b.c.d.e", "w.c1.e$1"):
            await log.bus.publish(f"tether.event.{log.tenant}.{subject}", b"rubbish")
        async with working(hooks):
            await log.frame("e1", [STARTED, ASKED])
            (note,) = await settled(hooks, "delivered")
        assert note.conversation == "c1" and len(receiver.bodies) == 1


async def test_an_outage_of_the_bus_in_the_middle_of_a_delivery_costs_a_repetition_and_not_the_process() -> None:
    with running_server() as server:
        async with await connect(server.url, name="webhooks") as bus:
            await ensure_tenants(bus, ["out"])
            log = Log(bus, "out", "c1", "w")
            reached, go = asyncio.Event(), asyncio.Event()

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                reached.set()
                await go.wait()
                writer.write(b"HTTP/1.1 204 x\r\n\r\n")
                writer.close()

            receiver = await asyncio.start_server(serve, "127.0.0.1", 0)
            hooks = hooks_of(log, [at(f"http://127.0.0.1:{receiver.sockets[0].getsockname()[1]}/")])
            work = asyncio.create_task(hooks.work(), name="webhooks")
            await log.frame("e1", [STARTED, ASKED])
            await reached.wait()
            server.kill()
            go.set()
            await asyncio.wait((work,), timeout=6)
            assert not work.done()
            server.start()
            (note,) = await settled(hooks, "delivered")
            assert note.status == 204
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            receiver.close()


async def test_an_outbox_that_was_made_anew_is_read_from_its_beginning() -> None:
    with running_server() as server:
        async with await connect(server.url, name="webhooks") as bus, receiving() as receiver:
            await ensure_tenants(bus, ["anew"])
            log = Log(bus, "anew", "c1", "w")
            hooks = hooks_of(log, [endpoint(receiver)])
            async with httpx2.AsyncClient() as client:
                deliverer = Deliverer(hooks.outbox, hooks.endpoints, client, Metrics())
                await hooks.outbox.add(notice("e1"), endpoint(receiver), 1)
                await deliverer._pass()
                await bus.request(f"$JS.API.STREAM.DELETE.KV_{subjects.NOTIFICATIONS}", b"", timeout_s=5)
                await ensure_tenants(bus, ["anew"])
                for number in range(4):  # more than there were, before anybody looked
                    await hooks.outbox.add(notice(f"x{number}"), endpoint(receiver), 1)
                await deliverer._pass()
        assert len(receiver.bodies) == 5


def notice(execution: str) -> Notice:
    return Notice(
        kind="response.ended",
        identity=f"{execution}/response.ended",
        tenant="anew",
        workspace="w",
        conversation="c1",
        execution=execution,
        at=1,
        data={"outcome": "completed"},
    )


@pytest.mark.parametrize("url", ["http://h:99999/", "http://h/\x01", "http://a b/", "http://", "ftp://h/", "http://["])
def test_an_address_that_is_none_is_refused_at_the_start(tmp_path: Path, url: str) -> None:
    path = tmp_path / "hooks.json"
    secret = "whsec_" + base64.b64encode(SECRET).decode()
    path.write_text(json.dumps([{"name": "a", "url": url, "secret": secret, "tenant": "t"}]))
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="http"):
        load_endpoints(path, ("t",))


async def test_an_endpoint_is_told_what_happens_from_its_first_start_on(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether_backend.webhooks.service._GRACE_MS", 0)
    await log.frame("e1", [STARTED, ASKED])
    async with receiving() as receiver:
        hooks = hooks_of(log, [endpoint(receiver)])
        await hooks.outbox.since_ms("chat", time.time_ns() // 1_000_000 + 1)
        await asyncio.sleep(0.01)  # the log's times are of another clock, to the millisecond
        async with working(hooks):
            await log.frame("e2", [STARTED, ASKED])
            await settled(hooks, "delivered")
        assert receiver.data()["data"]["execution"] == "e2" and len(receiver.bodies) == 1
        await log.bus.delete_consumer(subjects.events_stream(log.tenant), subjects.WEBHOOKS_DURABLE)
        again = hooks_of(log, [endpoint(receiver)])
        async with working(again):
            await log.frame("e3", [STARTED, ASKED])
            await settled(again, "delivered", 2)
        assert [json.loads(body)["data"]["execution"] for body in receiver.bodies] == ["e2", "e3"]

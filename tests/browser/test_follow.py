"""The JavaScript module in a real browser, over SSE and over WebSocket: each event once, in order, whatever breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support_backend import Backend, Log, ended, ensure_tenants, running_backend, text_delta, write_tokens
from support_backend_process import backend_process
from support_nats import NatsServer
from support_proxy import Proxy, running_proxy
from support_stream_page import follow, freeze, got, keys, silence, state, visit, wait_for, write
from tether import subjects, topology
from tether.bus import NatsBus
from tether_backend.core import stream
from tether_backend.http import course

if TYPE_CHECKING:
    from playwright.async_api import Page, Route

TRANSPORTS = ("sse", "ws")
HEARTBEAT_S = 0.2
both = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.fixture
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SSE_HEARTBEAT_S", HEARTBEAT_S)
    monkeypatch.setattr(course, "SSE_HEARTBEAT_S", HEARTBEAT_S)


@pytest.fixture
async def backend(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[Backend]:
    async with running_backend(bus, [tenant], tmp_path) as running:
        yield running


@pytest.fixture
async def proxy(backend: Backend) -> AsyncIterator[Proxy]:
    async with running_proxy(backend.port) as running:
        yield running


@both
async def test_history_comes_first_and_what_it_has_is_not_told_again(
    page: Page, backend: Backend, bus: NatsBus, tenant: str, transport: str
) -> None:
    log = Log(bus, tenant)
    await log.prompt("q1", "r1", "e1")
    await log.frame("e1", [log.started("e1"), text_delta(2, "ab"), text_delta(3, "c", offset=2)])
    await backend.projected("c1", "e1", 3)
    # The cursor of a history may lie before its rows: here as far as it can.
    await visit(page, backend.url)

    async def older(route: Route) -> None:
        answer = await route.fetch()
        await route.fulfill(response=answer, json={**await answer.json(), "cursor": beginning})

    reader = await backend.reader("c1", tenant).open()
    first = await reader.next()
    assert first is not None
    beginning = first.data["cursor"]
    await reader.close()
    await page.route("**/v1/conversations/c1", older)
    await follow(page, tenant, transport)
    await wait_for(page, "got.lives === 1")
    await log.prompt("q2", "r2", "e2")
    await log.frame("e1", [text_delta(4, "d", offset=3)])
    await wait_for(page, "got.events.length >= 3")
    told = await got(page)
    assert [one["why"] for one in told["histories"]] == ["start"]
    assert told["histories"][0]["history"]["items"][0]["state"]["text"] == "abc"
    assert told["events"] == ["q2/prompt.admitted", "q2/response.created", "e1/4"]
    assert told["replays"] == [False] * 3
    assert [name for name, _ in told["states"]] == ["loading", "connecting", "replaying", "live"]


@both
async def test_cuts_are_mended_from_the_cursor_and_each_event_comes_once_in_order(
    page: Page, proxy: Proxy, bus: NatsBus, tenant: str, transport: str
) -> None:
    log = Log(bus, tenant)
    await visit(page, proxy.url)
    await follow(page, tenant, transport)  # of a conversation that does not exist yet
    await wait_for(page, "got.lives === 1")
    await log.frame("e1", [log.started("e1")])
    total = 1
    for _ in range(8):
        await write(log, "e1", total + 1, total + 100)
        await wait_for(page, f"got.events.length > {total + 5}")
        assert proxy.cut() > 0
        await write(log, "e1", total + 101, total + 120)
        total += 120
    await wait_for(page, f"got.events.length >= {total} && sub.state === 'live'")
    told = await got(page)
    assert told["events"] == keys("e1", range(1, total + 1))
    assert told["generations"] == sorted(told["generations"])
    assert told["histories"][0]["history"]["messages"] == [] and len(told["histories"]) == 1
    assert [name for name, _ in told["states"]].count("waiting") >= 8


@both
async def test_a_tab_that_was_suspended_goes_on_where_it_was(
    page: Page, proxy: Proxy, bus: NatsBus, tenant: str, transport: str
) -> None:
    log = Log(bus, tenant)
    await visit(page, proxy.url)
    await follow(page, tenant, transport)
    await wait_for(page, "got.lives === 1")
    await log.frame("e1", [log.started("e1")])
    for was_cut in (False, True):
        await freeze(page, "frozen")
        start = 302 if was_cut else 2
        await write(log, "e1", start, start + 299)
        if was_cut:
            proxy.cut()
        await freeze(page, "active")
        await wait_for(page, f"got.events.length >= {start + 299}")
    await write(log, "e1", 602, 610)
    await wait_for(page, "got.events.length >= 610 && sub.state === 'live'")
    assert (await got(page))["events"] == keys("e1", range(1, 611))


@both
async def test_a_backend_that_is_killed_and_started_again_is_found_again(
    page: Page, bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, transport: str
) -> None:
    write_tokens(tmp_path / "tokens.json", [tenant])
    await ensure_tenants(bus, [tenant])
    log = Log(bus, tenant)
    async with backend_process(nats_server, tenant, tmp_path) as (child, port):
        await visit(page, f"http://127.0.0.1:{port}")
        await follow(page, tenant, transport)
        await wait_for(page, "got.lives === 1")
        await log.frame("e1", [log.started("e1")])
        await write(log, "e1", 2, 100)
        await wait_for(page, "got.events.length > 20")
        child.kill()
        await child.wait()
    await write(log, "e1", 101, 200)
    await wait_for(page, "sub.state === 'waiting'")
    async with backend_process(nats_server, tenant, tmp_path, port):
        await write(log, "e1", 201, 300)
        await wait_for(page, "got.events.length >= 300")
        assert (await got(page))["events"] == keys("e1", range(1, 301))
        await page.evaluate("window.sub.close()")
    told = await got(page)
    assert told["states"][-1] == ["closed", None] and await state(page) == "closed"


@both
@pytest.mark.usefixtures("quick_heartbeats")
async def test_a_connection_without_heartbeats_is_given_up_and_one_with_them_is_kept(
    page: Page, proxy: Proxy, bus: NatsBus, tenant: str, transport: str
) -> None:
    log = Log(bus, tenant)
    await visit(page, proxy.url)
    await follow(page, tenant, transport)
    await wait_for(page, "got.lives === 1")
    await silence(5 * HEARTBEAT_S)
    assert [name for name, _ in (await got(page))["states"]].count("connecting") == 1
    proxy.hold()
    await log.frame("e1", [log.started("e1")])
    await wait_for(page, "sub.generation > 1")
    proxy.release()
    await write(log, "e1", 2, 4)
    await wait_for(page, "got.events.length === 4")
    assert (await got(page))["events"] == keys("e1", range(1, 5))


@both
async def test_a_changed_log_is_told_and_the_state_taken_anew(
    page: Page, backend: Backend, bus: NatsBus, tenant: str, transport: str
) -> None:
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1"), text_delta(2, "old")])
    await backend.projected("c1", "e1", 2)
    await visit(page, backend.url)
    await follow(page, tenant, transport)
    await wait_for(page, "got.lives === 1")
    await bus.delete_stream(subjects.events_stream(tenant))
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    anew = Log(bus, tenant)
    await anew.frame("e2", [anew.started("e2"), text_delta(2, "new")])
    await wait_for(page, "got.problems.length === 1 && got.histories.length === 2")
    told = await got(page)
    assert told["problems"] == ["CURSOR_POSITION_CHANGED"] and told["histories"][1]["why"] == "snapshot"
    history = told["histories"][1]["history"]
    assert "old" in [item["state"].get("text") for item in history["items"]]
    await anew.frame("e2", [text_delta(3, "er", offset=3)])
    await wait_for(page, "got.events.at(-1) === 'e2/3'")
    applied = {one["execution"]: one["applied"] for one in history["executions"]}.get("e2", 0)
    assert (await got(page))["events"] == keys("e2", range(applied + 1, 4))


# The first connection's frames are held back and delivered once a newer connection is live.
LATE = {
    "sse": """() => {
      const real = window.fetch;
      let streams = 0;
      window.held = [];
      window.fetch = async (url, init) => {
        const path = new URL(url).pathname;
        if (!path.endsWith("/events") || ++streams > 1) return real(url, init);
        const { signal, ...rest } = init; // deaf: it outlives its being given up
        const response = await real(url, rest);
        const reader = response.body.getReader();
        const body = new ReadableStream({
          async start(controller) {
            window.deliver = (value) => controller.enqueue(value);
            for (;;) {
              const { value, done } = await reader.read();
              if (done) return;
              if (window.holding) window.held.push(value);
              else controller.enqueue(value);
            }
          },
        });
        const written = (data) => new TextEncoder().encode(`id: ${data.cursor}\\ndata: ${JSON.stringify(data)}\\n\\n`);
        window.forged = (data) => window.deliver(written(data));
        return new Response(body, { status: response.status, headers: response.headers });
      };
    }""",
    "ws": """() => {
      const Real = window.WebSocket;
      let sockets = 0;
      window.held = [];
      window.WebSocket = class extends Real {
        set onmessage(handler) {
          if (handler === null || ++sockets > 1) { super.onmessage = handler; return; }
          window.deliver = (data) => handler({ data });
          window.forged = (data) => handler({ data: JSON.stringify({ frame: "message", id: data.cursor, data }) });
          this.addEventListener("message", ({ data }) => {
            if (window.holding) window.held.push(data);
            else handler({ data });
          });
        }
        close() {}
      };
    }""",
}


@both
@pytest.mark.usefixtures("quick_heartbeats")
async def test_what_an_older_connection_delivers_late_is_ignored(
    page: Page, backend: Backend, bus: NatsBus, tenant: str, transport: str
) -> None:
    log = Log(bus, tenant)
    await visit(page, backend.url)
    await page.evaluate(LATE[transport])
    await follow(page, tenant, transport)
    await wait_for(page, "got.lives === 1")
    await log.frame("e1", [log.started("e1")])
    await wait_for(page, "got.events.length === 1")
    await page.evaluate("window.holding = true")
    await write(log, "e1", 2, 4)
    await wait_for(page, "sub.generation > 1 && sub.state === 'live' && got.events.length === 4")
    await log.prompt("q1", "r1", "e1")
    await wait_for(page, "got.events.length === 6 && window.held.length >= 1")
    cursor, generation = await page.evaluate("[window.sub.cursor, window.sub.generation]")
    # Before what was held, an event that the reader would take for new: only its connection's age is against it.
    await page.evaluate(
        """() => {
          window.forged({ execution: "e1", ordinal: 99, at: 1, type: "text.delta", body: {}, cursor: "old" });
          window.held.forEach(window.deliver);
        }"""
    )
    await log.frame("e1", [text_delta(5, "x", offset=3)])
    await wait_for(page, "got.events.length >= 7")
    told = await got(page)
    assert told["events"] == [*keys("e1", range(1, 5)), "q1/prompt.admitted", "q1/response.created", "e1/5"]
    assert told["lives"] == 2
    assert await page.evaluate("window.sub.cursor") != cursor
    assert await page.evaluate("window.sub.generation") == generation


@both
async def test_the_end_of_a_response_ends_the_subscription_also_where_it_was_over_before(
    page: Page, backend: Backend, bus: NatsBus, tenant: str, transport: str
) -> None:
    log = Log(bus, tenant)
    await log.prompt("q1", "r1", "e1")
    await log.own("e1")
    await visit(page, backend.url)
    await follow(page, tenant, transport, until="response:r1")
    await log.frame("e1", [log.started("e1"), text_delta(2, "a"), *ended(3)])
    await wait_for(page, "sub.state === 'ended'")
    told = await got(page)
    assert told["ends"][0]["outcome"] == "completed" and told["states"][-1][0] == "ended"
    cursor = await page.evaluate("window.sub.cursor")
    await follow(page, tenant, transport, until="response:r1", cursor=cursor)
    await wait_for(page, "sub.state === 'ended'")
    told = await got(page)
    assert len(told["ends"]) == 1 and told["events"] == [] and told["histories"] == []


@both
async def test_a_wrong_token_and_a_foreign_cursor_are_told_and_not_tried_again(
    page: Page, proxy: Proxy, bus: NatsBus, tenant: str, transport: str
) -> None:
    await visit(page, proxy.url)
    await follow(page, tenant, transport, token="wrong")
    await wait_for(page, "sub.state === 'unauthorized'")
    assert (await got(page))["states"][-1] == ["unauthorized", "UNAUTHENTICATED"]
    await follow(page, tenant, transport, cursor="abc")
    await wait_for(page, "sub.state === 'refused'")
    assert (await got(page))["states"][-1] == ["refused", "INVALID"]


@both
@pytest.mark.parametrize("options", [{"cursor": "rubbish"}, {"until": "nonsense"}], ids=["cursor", "until"])
async def test_a_stream_that_is_refused_is_told_as_such_and_not_tried_for_ever(
    page: Page, backend: Backend, tenant: str, transport: str, options: dict[str, str]
) -> None:
    await visit(page, backend.url)
    await follow(page, tenant, transport, **options)
    await wait_for(page, "sub.state === 'refused'")
    assert (await got(page))["states"][-1] == ["refused", "INVALID"]


async def test_requests_in_doubt_are_repeated_under_the_same_id_and_errors_have_their_fields(
    page: Page, backend: Backend, tenant: str
) -> None:
    await visit(page, backend.url)
    seen: list[tuple[str, dict[str, Any] | None, str | None]] = []

    async def once_lost(route: Route) -> None:
        request = route.request
        seen.append((request.url, request.post_data_json, await request.header_value("idempotency-key")))
        if len(seen) % 2:
            await route.fetch()  # it arrives, and its answer is lost
            await route.abort()
        else:
            await route.continue_()

    await page.route("**/messages", once_lost)
    await page.route("**/stop", once_lost)
    answer = """async (call) => {
      const { TetherClient } = await import("/static/tether.js");
      const client = new TetherClient({ token: TOKEN });
      try { return await client[call[0]](...call.slice(1)); }
      catch (error) {
        return { name: error.name, code: error.code, detail: error.detail, retryable: error.retryable,
          retryAfterS: error.retryAfterS, fields: error.fields };
      }
    }""".replace("TOKEN", repr(backend.headers()["Authorization"].removeprefix("Bearer ")))
    refused = await page.evaluate(answer, ["send", "c1", {"content": []}])
    assert refused["name"] == "TetherError" and refused["code"] == "INVALID" and not refused["retryable"]
    assert refused["fields"][0]["field"] == "content"
    (_, first, _), (_, second, _) = seen
    assert first is not None and first == second and first["request_id"].startswith("req_")
    gone = await page.evaluate(answer, ["stop", "e9"])
    assert gone["code"] == "NOT_FOUND" or gone["code"] == "TARGET_UNKNOWN"
    assert seen[2][2] == seen[3][2] and str(seen[2][2]).startswith("ctl_")
    listed = await page.evaluate(answer, ["conversations", {"limit": 5}])
    assert listed["conversations"] == []


async def test_event_streams_are_parsed_wherever_chunks_cut_them_and_damage_is_no_event(
    page: Page, backend: Backend
) -> None:
    text = (
        '\ufeffretry: 700\n\n: hb\n\nid: a\nevent: open\ndata: {"n":1}\n\n'
        'id: b\r\ndata: {"text":\r\ndata:  "ä€😀\\u2028"}\r\n\r\n'
        'data:{"n":3}\rid\r\r: hb\n\nevent: live\n\nid: c\ndata: {"cut": "off"'
    )
    await visit(page, backend.url)
    told = await page.evaluate(
        """async (text) => {
          const { SseParser } = await import("/static/tether.js");
          const bytes = new TextEncoder().encode(text);
          const results = new Set();
          for (let size = 1; size <= bytes.length; size++) {
            const frames = [];
            const parser = new SseParser((frame) => frames.push(frame));
            for (let at = 0; at < bytes.length; at += size) parser.feed(bytes.subarray(at, at + size));
            results.add(JSON.stringify(frames));
          }
          const damage = [];
          for (const bad of [[0xff, 0xfe, 0x0a], [...new TextEncoder().encode("data: {\\n\\n")]]) {
            try { new SseParser(() => damage.push("a frame")).feed(new Uint8Array(bad)); } catch (error) {
              damage.push(error.name);
            }
          }
          return { results: [...results].map(JSON.parse), damage };
        }""",
        text,
    )
    assert told["damage"] == ["TypeError", "SyntaxError"]
    assert told["results"] == [
        [
            {"name": "hb", "data": {}, "id": None},
            {"name": "open", "data": {"n": 1}, "id": "a"},
            {"name": "message", "data": {"text": "ä€😀\u2028"}, "id": "b"},
            {"name": "message", "data": {"n": 3}, "id": ""},
            {"name": "hb", "data": {}, "id": None},
        ]
    ]

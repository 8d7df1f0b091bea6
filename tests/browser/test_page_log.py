"""The page against a backend whose log is written by hand: gaps, recoveries, long conversations, what was left out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

import tether_backend
from support_backend import Log, ended, event, running_backend, text_delta, token_of
from support_page import assert_accessible, assert_fits, shown, sign_in
from tether import events as ev
from tether.bus import NatsBus
from tether.events import Event
from tether_backend.http import web

if TYPE_CHECKING:
    from playwright.async_api import Page

    from support_backend import Backend

pytestmark = pytest.mark.timeout(120)
ROW_PIXELS = 32  # rows that are not in view have an estimated height: a fraction of one may be off
LOG = "document.querySelector('.log')"
NAMES = "[...document.querySelectorAll('.tool .name')]"


@contextlib.asynccontextmanager
async def backend(bus: NatsBus, tenant: str, folder: Path) -> AsyncIterator[tuple[Backend, Log]]:
    async with running_backend(bus, [tenant], folder) as running:
        yield running, Log(bus, tenant)


async def open_c1(page: Page, running: Backend) -> None:
    await sign_in(page, running.url, token_of(running.tenant), "/c/c1")
    await page.wait_for_selector('.connection[data-kind="live"]')


def tool(ordinal: int, number: int) -> list[Event]:
    return [
        event(ordinal, ev.TOOL_STARTED, {"tool": f"t{number}", "name": f"tool{number:05d}", "input": {"n": number}}),
        event(ordinal + 1, ev.TOOL_COMPLETED, {"tool": f"t{number}", "status": "ok", "output": "x"}),
    ]


async def test_gaps_and_recoveries_are_shown_as_what_they_are_at_their_place(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    async with backend(bus, tenant, tmp_path) as (running, log):
        await log.prompt("q1", "r1", "e1")
        await log.frame("e1", [log.started("e1"), event(2, ev.TEXT_COMPLETED, {"segment": "a", "text": "before it"})])
        await open_c1(page, running)
        await page.wait_for_selector(".text >> text=before it")
        gap = {"from": 7, "to": 9, "reason": "spool_evicted"}
        after = {"segment": "b", "text": "after it"}
        await log.frame("e1", [event(3, ev.GAP, gap), event(4, ev.TEXT_COMPLETED, after)])
        await log.note(ev.RECOVERY, "rec1", {"stream": "resumed", "model_request": "unknown"})
        await log.frame("e1", [*ended(5, "lost")])
        await page.wait_for_selector(".notice.recovery")
        await page.wait_for_selector(".notice.end")
        text = await shown(page)
        parts = ["before it", "Events 7 to 9 are missing here.", "ran out of room", "after it", "Recovered."]
        places = [text.index(part) for part in parts]
        assert places == sorted(places)
        assert "Its process vanished before it was done." in text and "Parts of this response are missing" in text
        await running.projected("c1", "e1", 6)
        await page.reload()
        await page.wait_for_selector(".gap >> text=Events 7 to 9 are missing here.")
        assert (await shown(page)).count("after it") == 1


async def test_a_hole_in_the_log_is_told_once_and_what_follows_is_shown(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    async with backend(bus, tenant, tmp_path) as (running, log):
        await log.prompt("q1", "r1", "e1")
        await log.frame("e1", [log.started("e1"), text_delta(2, "one ")])
        await open_c1(page, running)
        await page.wait_for_selector(".text >> text=one")
        await log.frame("e1", [event(9, ev.TEXT_COMPLETED, {"segment": "z", "text": "behind the hole"})])
        await page.wait_for_selector(".text >> text=behind the hole")
        await page.wait_for_selector(".gap >> text=Events 3 to 8 are missing here.")
        assert await page.locator(".item.gap").count() == 1
        # One that the server sees as well is told by the stream too, and still stands in the text once.
        await log.frame("e1", [event(20, ev.TEXT_COMPLETED, {"segment": "y", "text": "behind the next"})])
        await page.wait_for_selector(".text >> text=behind the next")
        await page.wait_for_selector(".gap >> text=Events 10 to 19 are missing here.")
        await page.wait_for_selector(".notice.gap >> text=RETENTION_GAP")
        assert await page.locator(".item.gap").count() == 2
        assert (await shown(page)).count("behind the hole") == 1


async def test_a_conversation_of_ten_thousand_items_stays_quick_and_older_ones_are_loaded_on_demand(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    async with backend(bus, tenant, tmp_path) as (running, log):
        await log.prompt("q1", "r1", "e1")
        ordinal = 1
        events = [log.started("e1")]
        for number in range(10_000):
            events += tool(ordinal + 1, number)
            ordinal += 2
            if len(events) >= 400:
                await log.frame("e1", events)
                events = []
        await log.frame("e1", [*events, event(ordinal + 1, ev.TEXT_COMPLETED, {"segment": "s", "text": "at the end"})])
        await running.projected("c1", "e1", ordinal + 1)
        await open_c1(page, running)
        await page.wait_for_selector(".text >> text=at the end")
        assert await page.locator(".item").count() <= 200, "only the end is drawn"
        assert await page.evaluate(
            "(log => log.scrollHeight - log.scrollTop - log.clientHeight < 5)(document.querySelector('.log'))"
        )
        # What is looked at stays where it is while earlier ones are put before it.
        await page.evaluate("document.querySelector('.log').scrollTop = 300")
        name = await page.evaluate(f"{NAMES}.find((n) => n.getBoundingClientRect().top > 200).textContent")
        place = f"{NAMES}.find((n) => n.textContent === '{name}').getBoundingClientRect().top"
        before = await page.evaluate(place)
        for _ in range(7):
            drawn = await page.locator(".item").count()
            # Not Playwright's own click: it would scroll to the button.
            await page.evaluate("document.querySelector('.response > button').click()")
            await page.wait_for_function("(n) => document.querySelectorAll('.item').length > n", arg=drawn)
        assert abs(await page.evaluate(place) - before) < ROW_PIXELS
        assert await page.locator(".item").count() > 1200
        # New ones do not move who reads above, and say that they are there.
        await log.frame("e1", tool(ordinal + 2, 10_000))
        await page.wait_for_selector(".below")
        assert abs(await page.evaluate(place) - before) < ROW_PIXELS
        # A burst while the reader is at the end: one frame never takes long, and the document stays bounded.
        await page.click(".below")
        await page.evaluate(
            """() => { window.longest = 0; let last = performance.now();
                 const tick = (now) => {
                   window.longest = Math.max(window.longest, now - last);
                   last = now;
                   requestAnimationFrame(tick);
                 };
                 requestAnimationFrame(tick); }"""
        )
        ordinal += 4
        for start in range(0, 2000, 100):
            events = []
            for number in range(start, start + 100):
                events += tool(ordinal, 20_000 + number)
                ordinal += 2
            await log.frame("e1", events)
        await page.wait_for_function(
            "() => [...document.querySelectorAll('.tool .name')].at(-1).textContent === 'tool21999'"
        )
        assert await page.locator(".item").count() <= 1200
        assert await page.evaluate("window.longest") < 2000, (
            "generous: a shared machine; a redraw of everything takes longer"
        )


async def test_older_messages_are_loaded_before_the_newest_and_nothing_is_twice(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    async with backend(bus, tenant, tmp_path) as (running, log):
        for number in range(70):
            execution = f"e{number}"
            await log.prompt(f"q{number}", f"r{number}", execution, f"prompt {number:02d}")
            said = event(2, ev.TEXT_COMPLETED, {"segment": "s", "text": f"answer {number:02d}"})
            await log.frame(execution, [log.started(execution), said, *ended(3)])
        await running.projected("c1", "e69", 4)
        await open_c1(page, running)
        await page.wait_for_selector(".text >> text=answer 69")
        while await page.locator("text=Show earlier messages").is_visible():
            first = await page.locator(".message").count()
            await page.click("text=Show earlier messages")
            await page.wait_for_function("(n) => document.querySelectorAll('.message').length > n", arg=first)
        prompts = [text.split()[-1] for text in await page.locator(".message .body").all_text_contents()]
        answers = [text.split()[-1] for text in await page.locator(".response .text").all_text_contents()]
        assert prompts == answers == [f"{number:02d}" for number in range(70)]


async def test_an_interjection_and_a_takeover_are_told_and_a_failed_request_says_why(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    async with backend(bus, tenant, tmp_path) as (running, log):
        await open_c1(page, running)
        await log.prompt("q1", "r1", "e1", "first")
        await log.frame("e1", [log.started("e1")])
        body = {"prompt_sequence": 2, "content": [{"type": "text", "text": "by the way"}], "into": "r1"}
        await log.note(ev.PROMPT_ADMITTED, "q2/prompt.admitted", {"request": "q2", **body})
        await log.note(
            ev.RESPONSE_SUPERSEDED, "q1/response.superseded", {"request": "q1", "response": "r1", "by": "r3"}
        )
        failed = {"request": "q4", "code": "DRAINING", "detail": "it goes down", "retryable": True}
        await log.note(ev.RESPONSE_FAILED, "q4/response.failed", failed)
        await page.wait_for_selector("text=joined the running response")
        await page.wait_for_selector(".response .state >> text=replaced by a newer message")
        await page.wait_for_selector("text=DRAINING: it goes down")
        await page.wait_for_selector("text=The sandbox is being put to sleep. Try again in a moment.")


async def test_an_answer_without_a_reply_is_told_as_unknown_with_a_way_to_ask_again(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    async with backend(bus, tenant, tmp_path) as (running, log):
        await log.prompt("q1", "r1", "e1")
        ask = {"interaction": "i", "kind": "approval", "name": "Bash", "input": {"command": "rm \u202etxt"}}
        await log.frame("e1", [log.started("e1"), event(2, ev.INTERACTION_REQUESTED, ask)])
        await log.own("e1")
        await running.projected("c1", "e1", 2)
        await open_c1(page, running)
        assert "rm \\u202etxt" in await page.inner_text(".ask pre"), "what turns text around is shown as its code"
        await page.click(".ask >> text=Allow >> nth=0")  # nobody is there to take it
        await page.wait_for_selector(".ask .status >> text=No reply in time: it may have been taken or not.")
        assert await page.locator(".ask button:enabled >> text=Deny").count() == 1, "the form stays"
        await page.click("text=Ask what became of it")
        receipt = {"control": "x", "verb": "answer", "status": "settled", "interaction": "i"}
        resolved = {"interaction": "i", "outcome": "answered"}
        await log.frame("e1", [event(3, ev.CONTROL_RECEIPT, receipt), event(4, ev.INTERACTION_RESOLVED, resolved)])
        await page.wait_for_selector(".ask h4 >> text=Allowed: Bash")


async def test_what_an_agent_offers_beyond_this_once_is_a_button_that_sends_it(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    async with backend(bus, tenant, tmp_path) as (running, log):
        await log.prompt("q1", "r1", "e1")
        options = [
            {"id": "yes", "label": "Yes", "kind": "allow_once"},
            {"id": "yes-ever", "label": "Always allow ls", "kind": "allow_always"},
            {"id": "no-ever", "label": "Never", "kind": "reject_always"},
        ]
        ask = {"interaction": "i", "kind": "approval", "name": "Bash", "input": {}, "options": options}
        await log.frame("e1", [log.started("e1"), event(2, ev.INTERACTION_REQUESTED, ask)])
        await log.own("e1")
        await running.projected("c1", "e1", 2)
        await open_c1(page, running)
        await page.wait_for_selector(".ask button >> text=Never")
        assert await page.locator(".ask .row >> nth=0").locator("button").all_inner_texts() == [
            "Allow",
            "Deny",
            "Always allow ls",
            "Never",
        ]
        async with page.expect_request(lambda request: "/interactions/" in request.url) as sent:
            await page.click(".ask button >> text=Always allow ls")
        assert (await sent.value).post_data_json == {
            "decision": "allow",
            "answers": {"option": ["yes-ever"]},
            "execution": "e1",
        }


@pytest.mark.parametrize(
    ("ask", "words", "sent"),
    [
        (
            {
                "kind": "approval",
                "name": "Bash",
                "input": {"command": "ls"},
                "offered": {"decision": "allow", "control": "k"},
            },
            "Allow",
            {"decision": "allow"},
        ),
        (
            {
                "kind": "approval",
                "name": "Bash",
                "offered": {"decision": "deny", "text": "not today", "answers": {"option": ["of-old"]}},
            },
            "Deny: not today",
            {"decision": "deny", "text": "not today"},
        ),
        (
            {
                "kind": "approval",
                "name": "Bash",
                "options": [{"id": "ever", "label": "Always allow ls", "kind": "allow_always"}],
                "offered": {"decision": "allow", "answers": {"option": ["ever"]}},
            },
            "Always allow ls",
            {"decision": "allow", "answers": {"option": ["ever"]}},
        ),
        (
            {
                "kind": "question",
                "questions": [{"id": "q", "question": "Which?", "options": [{"label": "Red"}, {"label": "Blue"}]}],
                "offered": {"decision": "allow", "answers": {"q": ["Blue"]}},
            },
            "Blue",
            {"decision": "allow", "answers": {"q": ["Blue"]}},
        ),
    ],
    ids=["allow", "deny", "option", "question"],
)
async def test_an_answer_from_before_is_given_again_by_one_key_and_only_by_whoever_answers(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path, ask: dict[str, Any], words: str, sent: dict[str, Any]
) -> None:
    async with backend(bus, tenant, tmp_path) as (running, log):
        await log.prompt("q1", "r1", "e1")
        recovered = {"process": 2, "why": "not_found", "source": "export", "rows": 12, "partial": True, "from": "old"}
        asked = event(3, ev.INTERACTION_REQUESTED, {"interaction": "i", **ask})
        await log.frame("e1", [log.started("e1"), event(2, ev.SESSION_RECOVERED, recovered), asked])
        await log.own("e1")
        await running.projected("c1", "e1", 3)
        await open_c1(page, running)
        await page.wait_for_selector(f".ask >> text=You answered this before: {words}. Give the same answer again?")
        told = await page.inner_text(".item.session")
        assert "earlier session is lost" in told and "12 rows" in told and "left out" in told
        await assert_accessible(page)
        await assert_fits(page)
        again = page.locator(".ask button", has_text="Give the same answer")
        assert await again.count() == 1 and await page.locator(".ask button.primary").count() == 1
        await page.focus(".ask pre" if "input" in ask else ".ask h4")
        await page.keyboard.press("Tab")
        assert await again.evaluate("(node) => node === document.activeElement"), "it comes before the other answers"
        async with page.expect_request(lambda request: "/interactions/" in request.url) as request:
            await page.keyboard.press("Enter")
        assert (await request.value).post_data_json == {**sent, "execution": "e1"}


async def test_new_text_is_told_to_a_screen_reader_once_and_replayed_text_is_not(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    async with backend(bus, tenant, tmp_path) as (running, log):
        await log.prompt("q1", "r1", "e1")
        await log.frame("e1", [log.started("e1"), event(2, ev.TEXT_COMPLETED, {"segment": "a", "text": "long ago"})])
        await open_c1(page, running)
        await page.wait_for_selector(".text >> text=long ago")
        await page.evaluate(
            """() => { window.heard = []; const node = document.getElementById("announcer");
                 const hear = () => window.heard.push(node.textContent);
                 new MutationObserver(hear).observe(node, { childList: true }); }"""
        )
        deltas = [text_delta(3 + n, "word ", segment="b", offset=5 * n) for n in range(50)]
        await log.frame("e1", deltas)
        await log.frame("e1", [event(53, ev.TEXT_COMPLETED, {"segment": "b", "text": "word " * 50})])
        ask: dict[str, Any] = {"interaction": "i", "kind": "approval", "name": "Bash", "input": {"command": "ls"}}
        await log.frame("e1", [event(54, ev.INTERACTION_REQUESTED, ask)])
        await page.wait_for_function("() => window.heard.length >= 2")
        heard = await page.evaluate("window.heard")
        assert heard == [("word " * 50), "Approval needed: Bash"]


async def test_the_files_are_cached_by_their_content_and_need_the_host_but_no_token(
    bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    async with (
        backend(bus, tenant, tmp_path) as (running, _),
        httpx2.AsyncClient(base_url=running.url, timeout=30.0) as client,
    ):
        for path in sorted(web.PATHS):
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"] == web.POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            etag = answer.headers["etag"]
            again = await client.get(path, headers={"If-None-Match": f'W/{etag}, "other"'})
            assert again.status_code == 304 and again.content == b""
            assert (await client.head(path)).headers["etag"] == etag
            assert (await client.get(path, headers={"If-None-Match": '"other"'})).status_code == 200
            assert (await client.get(path, headers={"Host": "rebound.example"})).status_code == 403
        assert (await client.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await client.get("/static/app.js")).headers["content-type"] == "text/javascript; charset=utf-8"
        signed = {"Authorization": f"Bearer {token_of(tenant)}"}
        for path in ("/static/nothing.js", "/static/index.html", "/static/", "/config.py"):
            assert (await client.get(path)).status_code == 401, path
            assert (await client.get(path, headers=signed)).status_code == 404, path


def test_the_list_of_files_is_what_the_package_has() -> None:
    folder = Path(tether_backend.__file__).with_name("web")
    assert {one.name for one in folder.iterdir()} == {*web.FILES, web.INDEX}

"""The page where a sandbox is drained, sleeps or wakes, and where an agent's session could not be resumed.

The agent service and the collector are played by hand: the page has to show whatever they say.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support_backend import Backend, Log, ensure_tenants, event, eventually, running_backend, token_of
from support_page import assert_accessible, assert_fits, sign_in
from support_sandboxes import HandAgent, register, report_of, write_record, write_reference
from tether import events as ev
from tether import subjects
from tether.bus import NatsBus
from tether.errors import Code, problem
from tether.sandbox import DrainOrder, DrainReport

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = pytest.mark.timeout(120)
LOST = {"code": "RESUME_FAILED", "detail": "there is no session 0b6e", "choices": ["fresh", "history"]}
NAMES = ("Send it again in a fresh session", "Send it again with the history")


@pytest.fixture
async def backend(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[Backend]:
    await ensure_tenants(bus, [tenant])
    async with running_backend(bus, [tenant], tmp_path) as running:
        yield running


async def failed(log: Log, backend: Backend, error: dict[str, Any]) -> None:
    """A request whose response ended so."""
    await log.own("e1")
    await log.prompt("q1", "r1", "e1", "water the roses")
    ended = {"outcome": "failed", "error": error}
    proof = {"outcome": "failed", "exit": 1, "proof": {"method": "pid_namespace", "at": 1}}
    events = [log.started("e1"), event(2, ev.RESPONSE_ENDED, ended), event(3, ev.EXECUTION_ENDED, proof)]
    await log.frame("e1", events)
    await log.own(None)
    await backend.projected("c1", "e1", 3)


async def assert_good(page: Page) -> None:
    for width in (360, 1280):
        await page.set_viewport_size({"width": width, "height": 720})
        await assert_fits(page)
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            await assert_accessible(page)


@pytest.mark.parametrize("replayed", [True, False])
async def test_a_lost_session_leaves_a_choice_and_the_same_message_is_sent_again_with_it(
    page: Page, backend: Backend, bus: NatsBus, tenant: str, *, replayed: bool
) -> None:
    """Read from the history, or seen as it happens."""
    log = Log(bus, tenant)
    if replayed:
        await failed(log, backend, LOST)
    await sign_in(page, backend.url, token_of(tenant), "/c/c1")
    await page.wait_for_selector('.connection[data-kind="live"]')
    if not replayed:
        await failed(log, backend, LOST)
    await page.wait_for_selector(f"text={NAMES[0]}")
    assert await page.locator(".response .row button").all_inner_texts() == [*NAMES]
    await page.wait_for_selector("text=RESUME_FAILED – there is no session 0b6e")
    await assert_good(page)
    await page.focus(f"text={NAMES[1]}")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".outbox >> text=water the roses")

    async def look() -> Any:
        return await bus.next_after(subjects.PROMPTS_STREAM, 0, f"tether.prompt.{tenant}.*.c1")

    sent = json.loads((await eventually(look, "the prompt")).data)
    assert sent["content"] == [{"type": "text", "text": "water the roses"}]
    assert (sent["resume"], sent["agent"]["kind"]) == ("history", "scripted") and sent["request_id"] != "q1"
    assert await page.locator(f"text={NAMES[0]}").count() == 0, "it was chosen"


async def test_only_what_the_agent_leaves_is_offered_and_nothing_for_another_failure(
    page: Page, backend: Backend, bus: NatsBus, tenant: str
) -> None:
    await failed(Log(bus, tenant), backend, {**LOST, "choices": ["fresh"]})
    other = Log(bus, tenant, conversation="c2")
    refusal = {"request": "q2", "code": "CAPABILITY_MISSING", "detail": "no such agent"}
    await other.note(ev.PROMPT_ADMITTED, "q2/prompt.admitted", {"request": "q2", "prompt_sequence": 2, "content": []})
    await other.note(ev.RESPONSE_FAILED, "q2/response.failed", refusal)
    await sign_in(page, backend.url, token_of(tenant), "/c/c1")
    await page.wait_for_selector(f"text={NAMES[0]}")
    assert await page.locator(f"text={NAMES[1]}").count() == 0
    await page.evaluate("() => { location.hash = '#/c/c2'; }")
    await page.wait_for_selector("text=This message came to nothing.")
    assert await page.locator(".notice button").count() == 0
    told = {"request": "q3", "code": "RESUME_FAILED", "detail": "the checkpoint is nowhere"}
    await other.note(ev.PROMPT_ADMITTED, "q3/prompt.admitted", {"request": "q3", "prompt_sequence": 3, "content": []})
    await other.note(ev.RESPONSE_FAILED, "q3/response.failed", told)
    await page.wait_for_selector(f".notice >> text={NAMES[1]}")


async def test_a_sandbox_is_suspended_once_it_was_asked_followed_and_woken_by_keyboard(
    page: Page, backend: Backend, bus: NatsBus, tenant: str
) -> None:
    await write_record(bus, tenant, "w1")
    await register(bus, tenant, "w1", idle_since=1_800_000_000_000)
    running = DrainReport(drain="d1", state="running", phase="checkpoint")
    agent = HandAgent(bus, [running, running, report_of(tenant, "w1", "d1", revision=4)])
    async with agent.serving():
        await sign_in(page, backend.url, token_of(tenant), "/sandboxes")
        await page.locator(".card summary").click()
        await page.wait_for_selector("text=idle since")
        await page.focus("text=Suspend…")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("dialog >> text=Suspend this sandbox?")
        await assert_good(page)
        await page.keyboard.press("Escape")
        await page.wait_for_selector("dialog", state="detached")
        assert agent.asked == [], "nothing was done without an answer"
        await page.click("text=Suspend…")
        await page.focus("dialog >> text=Suspend it")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".actions >> text=What is needed to go on is kept.")
        await write_record(bus, tenant, "w1", "suspended", drained=report_of(tenant, "w1", "d1"))
        await write_reference(bus, tenant, "w1")
        await page.wait_for_selector(".actions >> text=It is suspended; a message wakes it.")
        await page.wait_for_selector("text=suspended: a message wakes it")
        facts = await page.locator(".card .body").inner_text()
        assert "7 files, 180 KiB · sessions · on its volume and in the blob store · something was killed" in facts
        assert "was killed at the end of the grace; cut: Bash; its turn is not finished" in facts
        await assert_good(page)
        await page.focus("text=Resume")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".actions >> text=It wakes.")
    assert [verb for verb, _ in agent.asked if verb != "drain-status"] == ["suspend", "resume"]


async def test_who_keeps_a_sandbox_awake_is_named_and_a_drain_of_another_is_followed(
    page: Page, backend: Backend, bus: NatsBus, tenant: str
) -> None:
    await write_record(bus, tenant, "w1")
    await register(bus, tenant, "w1")
    who = [{"conversation": "garden", "execution": "e1", "state": "waiting"}]
    agent = HandAgent(bus, refuse=problem(Code.SESSION_BUSY, "the sandbox is not idle", executions=who))
    async with agent.serving():
        await sign_in(page, backend.url, token_of(tenant), "/sandboxes")
        await page.locator(".card summary").click()
        await page.click("text=Suspend…")
        await page.click("dialog >> text=Suspend it")
        await page.wait_for_selector("text=It is not idle: garden (waiting).")
        agent.refuse, agent.running = None, "d7"
        agent.reports = [DrainReport(drain="d7", state="running", phase="leaving")]
        await write_record(bus, tenant, "w1", "draining", drain=DrainOrder(drain="d7", reason="new kernel"))
        await page.wait_for_selector(".actions >> text=Its agents are asked to leave.")
        assert "d7 · drain · new kernel" in await page.locator(".card .body").inner_text()
        assert await page.locator(".actions button:visible").count() == 0


async def test_a_conversation_says_that_its_sandbox_sleeps_and_that_a_message_wakes_it(
    page: Page, backend: Backend, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await failed(log, backend, {"code": "model_error", "detail": "refused"})
    await write_record(bus, tenant, log.workspace, "suspended")
    await sign_in(page, backend.url, token_of(tenant), "/c/c1")
    await page.wait_for_selector(".head >> text=Its sandbox sleeps; a message wakes it.")
    await assert_good(page)
    await write_record(bus, tenant, log.workspace, "active")
    await page.wait_for_selector(".head >> text=Its sandbox sleeps", state="hidden")

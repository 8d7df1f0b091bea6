"""The page against a whole set with the scripted agent, as somebody at a browser uses it."""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from support_page import WAIT_MS, assert_accessible, assert_fits, send, shown, sign_in
from support_set import TetherSet, running_set

if TYPE_CHECKING:
    from playwright.async_api import Page, Route

pytestmark = pytest.mark.timeout(240)
PENDING = '.ask[data-state="pending"]'
DONE = '.response .state[data-state="completed"]'


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set() as started:
        yield started


async def open_new(page: Page, up: TetherSet) -> str:
    """Signed in, in a conversation that does not exist yet, the scripted agent chosen."""
    name = f"c{uuid.uuid4().hex[:8]}"
    await sign_in(page, up.state.http_url, up.state.token, f"/c/{name}")
    await page.fill(".option input >> nth=0", "scripted")
    await page.wait_for_selector('.connection[data-kind="live"]')
    return name


async def wait_text(page: Page, text: str) -> None:
    await page.wait_for_function(
        "(text) => document.querySelector('.log').innerText.includes(text)", arg=text, timeout=WAIT_MS
    )


async def focused(page: Page) -> str:
    return str(await page.evaluate("document.activeElement.textContent || document.activeElement.tagName"))


async def test_the_form_signs_in_and_a_wrong_token_is_told_apart_from_no_answer(page: Page, up: TetherSet) -> None:
    page.set_default_timeout(WAIT_MS)
    await page.goto(up.state.http_url)
    await assert_accessible_door(page)
    await page.keyboard.type("not-the-token")
    await page.keyboard.press("Enter")
    await page.wait_for_selector("text=This token is not accepted.")
    await page.route("**/v1/**", lambda route: route.fulfill(status=500, body="a proxy's page"))
    await page.keyboard.press("Enter")
    await page.wait_for_selector("text=RUNTIME_UNAVAILABLE")
    await page.unroute("**/v1/**")
    await page.fill("#token", up.state.token)
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".shell")
    await page.reload()
    await page.wait_for_selector(".shell")


async def assert_accessible_door(page: Page) -> None:
    assert await page.evaluate("document.activeElement.id") == "token"
    assert await page.get_attribute("#token", "type") == "password"


async def test_the_fragments_token_leaves_the_address_and_a_refused_one_leads_to_the_form(
    page: Page, up: TetherSet
) -> None:
    await sign_in(page, up.state.http_url, up.state.token)
    assert page.url == f"{up.state.http_url}/#/"
    assert await page.evaluate("history.length") <= 2, "the address with the token is not kept"
    await page.evaluate("sessionStorage.setItem('tether.token', 'of-yesterday')")
    await page.reload()
    await page.wait_for_selector("text=The token is no longer accepted.")
    assert await page.evaluate("sessionStorage.getItem('tether.token')") is None


async def test_a_prompt_streams_its_answer_and_folds_its_tools(page: Page, up: TetherSet) -> None:
    name = await open_new(page, up)
    gate = up.home / f"{name}.gate"
    await send(
        page,
        "!reasoning first think\n!deltas 40 40\n"
        f"!wait_file {gate}\n!tool look 5 40\n!usage 1200 34 0.5\n!say **all** done",
    )
    await page.wait_for_selector('.text[data-state="streaming"]')
    await wait_text(page, "e000040")
    await page.wait_for_selector(".bar >> text=scripted is running")
    gate.touch()
    await page.wait_for_selector(DONE)
    await wait_text(page, "all done")
    assert await page.inner_text(".text strong") == "all"
    assert "1,200 in, " in await page.inner_text(".usage") and "$0.5" in await page.inner_text(".usage")
    tool = page.locator("details.tool")
    assert await tool.locator(".label").inner_text() == "done"
    assert await tool.locator("pre").count() == 0, "a folded tool is not built"
    await tool.locator("summary").click()
    assert "000000000000000" in await tool.locator("pre").last.inner_text()
    assert await page.locator(".bar").is_hidden()
    await page.reload()
    await wait_text(page, "all done")
    again = await shown(page)
    assert again.count("e000040") == 1 and again.count("all done") == 1
    await page.wait_for_selector(f'.conversations a[aria-current="page"] >> text={name}')


async def test_an_approval_is_allowed_and_another_denied_in_place(page: Page, up: TetherSet) -> None:
    await open_new(page, up)
    await send(page, "!ask remove\n!ask erase\n!say after")
    await page.wait_for_selector(f"{PENDING} >> text=May it run remove?")
    await page.wait_for_function("() => document.title.startsWith('(1) ')")
    assert await page.inner_text(".bar-text") == "scripted waits for you"
    await page.click(f"{PENDING} >> text=Allow >> nth=0")
    await page.wait_for_selector(f"{PENDING} >> text=May it run erase?")
    await page.click(f"{PENDING} >> text=Say why not")
    await page.fill(f"{PENDING} input[type=text]", "not on my watch")
    await page.click(f"{PENDING} >> text='Deny'")
    await page.wait_for_selector(DONE)
    titles = await page.locator(".ask h4").all_inner_texts()
    assert titles == ["Allowed: remove", "Denied: erase"]
    await page.click("details.tool >> nth=1")
    await wait_text(page, "not on my watch")
    assert (await page.locator("details.tool .label").all_inner_texts()) == ["done", "failed"]


async def test_changed_input_must_be_an_object_and_is_what_the_tool_gets(page: Page, up: TetherSet) -> None:
    await open_new(page, up)
    await send(page, "!ask remove\n!say after")
    await page.click(f"{PENDING} >> text=Say why not")
    text = page.locator(f"{PENDING} textarea")
    await text.fill("[1]")
    assert "must be a JSON object" in await page.inner_text(f"{PENDING} .error")
    await text.fill('{"path": ')
    await page.click(f"{PENDING} >> text=Allow with this input")
    assert "This is not JSON" in await page.inner_text(f"{PENDING} .error")
    assert await text.get_attribute("aria-invalid") == "true"
    await text.fill('{"path": "/only/this"}')
    async with page.expect_request("**/interactions/**") as sent:
        await page.click(f"{PENDING} >> text=Allow with this input")
    body: Any = (await sent.value).post_data_json
    assert body["decision"] == "allow" and body["input"] == {"path": "/only/this"}
    await page.wait_for_selector(DONE)
    assert (await page.locator(".ask h4").all_inner_texts()) == ["Allowed: remove"]


async def test_questions_with_several_parts_are_answered_with_the_keyboard_alone(page: Page, up: TetherSet) -> None:
    await open_new(page, up)
    await page.focus(".composer textarea")
    await page.keyboard.type("!question Which base? | Postgres | SQLite ;; [multi] Where? | eu | us | asia")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("!say thanks")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(f"{PENDING} fieldset")
    await page.keyboard.press("Shift+Tab")  # Stop…
    await page.keyboard.press("Shift+Tab")  # Interrupt
    await page.keyboard.press("Shift+Tab")  # Go to it
    assert await focused(page) == "Go to it"
    await page.keyboard.press("Enter")
    assert await focused(page) == "The agent asks"
    await page.keyboard.press("Tab")
    await page.keyboard.press("ArrowDown")  # SQLite: the second of the group
    await page.keyboard.press("Tab")  # own words
    await page.keyboard.press("Tab")
    await page.keyboard.press("Space")  # eu
    await page.keyboard.press("Tab")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Space")  # asia
    await page.keyboard.press("Tab")
    await page.keyboard.type("the moon")
    await page.keyboard.press("Enter")
    await wait_text(page, "thanks")
    await page.wait_for_selector(DONE)
    assert '{"q1":["SQLite"],"q2":["eu","asia","the moon"]}' in (await shown(page)).replace(" :", ":")
    assert await focused(page) == "TEXTAREA", "focus goes on to the composer"


async def test_a_retried_models_text_is_withdrawn_and_a_failure_says_what_to_do(page: Page, up: TetherSet) -> None:
    await open_new(page, up)
    await send(page, "!retry 2\n!say better\n!fail overloaded")
    await page.wait_for_selector(".notice.end")
    text = await shown(page)
    assert "Withdrawn: the model's request was made again." in text
    assert "This response failed" in text and "Send a message to try again." in text


async def test_interrupt_ends_the_turn_and_stop_asks_first(page: Page, up: TetherSet) -> None:
    await open_new(page, up)
    await send(page, "!say working\n!hang")
    await page.wait_for_selector(".response .text >> text=working")
    await page.click("text=Interrupt")
    await page.wait_for_selector("text=This response was interrupted")
    await send(page, "!say again\n!hang")
    await page.wait_for_selector(".response >> nth=1 >> text=again")
    await page.click("text=Stop…")
    assert await focused(page) == "Let it run", "the harmless one has the focus"
    await page.keyboard.press("Escape")
    await page.wait_for_selector("dialog", state="detached")
    await page.click("text=Stop…")
    await page.click("dialog >> text=Stop it")
    await page.wait_for_selector("text=This response was stopped")


async def test_what_an_agent_prints_runs_nothing_and_links_nowhere_but_to_the_web(page: Page, up: TetherSet) -> None:
    await open_new(page, up)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.evaluate("window.hurt = 0")
    hostile = (
        "<img src=x onerror=hurt=1><script>hurt=1</script> [a](javascript:hurt=1) [b](data:text/html,x) "
        "[c](https://example.org/x) [d](//example.org) ![e](http://evil.invalid/p.png) <https://example.com> "
        "\u202etxt.exe"
    )
    await send(page, f"!say {hostile}\n!ask remove")
    await page.wait_for_selector(PENDING)
    assert await page.locator(".log img, .log script, .log b, .log iframe").count() == 0
    links = await page.locator(".log a").evaluate_all("(all) => all.map((a) => [a.href, a.rel, a.target])")
    rel = "noopener noreferrer nofollow"
    assert links == [
        ["https://example.org/x", rel, "_blank"],
        ["http://evil.invalid/p.png", rel, "_blank"],
        ["https://example.com/", rel, "_blank"],
    ]
    assert "<img src=x onerror=hurt=1>" in await shown(page)
    assert "\u202e" not in await page.inner_text(".response")
    assert await page.evaluate("window.hurt") == 0
    assert {url for url in asked if not url.startswith(up.state.http_url)} == set(), "no request leaves the origin"
    await page.click("text=Interrupt")


async def test_a_draft_survives_a_reload_and_enter_sends_where_shift_enter_does_not(page: Page, up: TetherSet) -> None:
    await open_new(page, up)
    await page.focus(".composer textarea")
    await page.keyboard.type("!say one")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("!say two")
    await page.reload()
    await page.wait_for_selector(".composer textarea")
    assert await page.input_value(".composer textarea") == "!say one\n!say two"
    await page.press(".composer textarea", "Enter")
    await page.wait_for_selector(DONE)
    assert await page.input_value(".composer textarea") == ""
    assert await page.locator(".message").count() == 1


async def test_a_message_whose_outcome_is_not_known_is_kept_and_sent_again_as_the_same_one(
    page: Page, up: TetherSet
) -> None:
    await open_new(page, up)
    bodies: list[Any] = []

    async def lose_the_answer(route: Any) -> None:
        bodies.append(route.request.post_data_json["request_id"])
        await route.fulfill(status=500, body="a proxy's page")

    await page.route("**/messages", lose_the_answer)
    await send(page, "!say exactly once")
    await page.wait_for_selector(".sending >> text=sent again it still counts once")
    await page.reload()
    await page.wait_for_selector(".sending >> text=Send again")
    await page.unroute("**/messages")
    async with page.expect_request("**/messages") as sent:
        await page.click("text=Send again")
    body: Any = (await sent.value).post_data_json
    assert body["request_id"] == bodies[0]
    await page.wait_for_selector(DONE)
    assert await page.locator(".message").count() == 1


async def test_a_backend_that_is_killed_in_mid_stream_is_told_and_nothing_comes_twice(
    page: Page, up: TetherSet
) -> None:
    await open_new(page, up)
    # What the connection says, from now on.
    await page.evaluate(
        """() => { window.told = []; const node = document.querySelector(".connection");
             new MutationObserver(() => window.told.push(node.textContent)).observe(node, { childList: true }); }"""
    )
    await send(page, "!deltas 250 20\n!tool look\n!say the end")
    await wait_text(page, "e000050")
    os.kill(up.state.children["backend"].pid, signal.SIGKILL)
    await page.wait_for_selector('.connection[data-kind="down"]')
    await page.wait_for_selector(DONE)
    await page.wait_for_selector('.connection[data-kind="live"]')
    told = await page.evaluate("window.told")
    assert told[0] == "Reconnecting" and told[-1] == "Live" and "Live" not in told[:-1]
    text = await shown(page)
    numbers = re.findall(r"e(\d{6})", text)
    assert numbers == [f"{n:06d}" for n in range(1, 251)]
    assert await page.locator(".response .text").count() == 2 and await page.locator(".tool").count() == 1
    assert await page.locator(".gap, .notice").count() == 0


async def test_lists_show_states_and_the_facts_of_executions_and_sandboxes(page: Page, up: TetherSet) -> None:
    name = await open_new(page, up)
    await send(page, "!say hi\n!ask remove")
    await page.wait_for_selector(PENDING)
    row = page.locator(f".conversations a:has-text('{name}')")
    await row.locator("text=waiting for you").wait_for()
    assert await row.locator(".badge").inner_text() == "1"
    await page.fill(".side input", "no-such")
    await page.wait_for_selector("text=None of those loaded matches. Enter opens the conversation of this id.")
    await page.fill(".side input", name[:6])
    assert await page.locator(".conversations li").count() == 1
    await page.click("text=Executions")
    card = page.locator(f".card:has-text('{name}')").first
    await page.wait_for_selector(".card")
    await page.locator(".card summary").first.click()
    await card.locator("text=its sandbox, live").wait_for()
    facts = await card.inner_text()
    for fact in ("CLI version\n1.0.0", "owns its conversation\nyes", "it has not ended", "process generation\n1"):
        assert fact in facts
    await assert_accessible(page)
    await page.click("nav >> text=Sandboxes")
    sandbox = page.locator(f".card:has-text('{name}')").first
    await page.wait_for_selector(".card")
    for summary in await page.locator(".card summary").all():
        await summary.click()
    await sandbox.locator("text=connected").first.wait_for()
    facts = await sandbox.inner_text()
    assert "executionSnapshotAttach" in facts and "boot\nboot_" in facts
    await page.goto(f"{up.state.http_url}/#/c/{name}")
    await page.click(f"{PENDING} >> text='Deny'")
    await page.wait_for_selector(DONE)


async def assert_good(page: Page) -> None:
    """At desktop and phone width, in light and dark."""
    for width in (360, 1280):
        await page.set_viewport_size({"width": width, "height": 720})
        await assert_fits(page)
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            await assert_accessible(page)


async def test_every_view_has_names_contrast_and_no_horizontal_scrolling(page: Page, up: TetherSet) -> None:
    await open_new(page, up)
    word = "x" * 300
    await send(page, f"!reasoning hm {word}\n!say `{word}` https://example.org/{word}\n!tool {'t' * 60}")
    await page.wait_for_selector(DONE)
    await send(page, f"!fail {'f' * 60}")
    await page.wait_for_selector(".notice.end")
    await send(page, f"!ask look\n!question {word}? | {word} | b")
    await page.wait_for_selector(PENDING)
    await page.click(f"{PENDING} >> text=Say why not")
    for summary in await page.locator(".item > summary").all():
        await summary.click()
    await assert_good(page)
    await page.click(f"{PENDING} >> text=Allow >> nth=0")
    await page.wait_for_selector(f"{PENDING} fieldset")
    await assert_good(page)
    await page.click("text=Stop…")
    await assert_good(page)
    await page.click("dialog >> text=Stop it")
    await page.wait_for_selector("text=This response was stopped")
    for view in ("/executions", "/sandboxes", "/"):
        await page.evaluate("(hash) => { location.hash = hash; }", f"#{view}")
        await page.wait_for_selector(".card" if view != "/" else ".conversations a")
        await assert_good(page)
    await page.click("text=Sign out")
    await page.wait_for_selector(".sign-in")
    await assert_good(page)


async def test_a_list_that_gets_no_answer_is_not_said_to_be_live(page: Page, up: TetherSet) -> None:
    await sign_in(page, up.state.http_url, up.state.token, "/executions")
    await page.wait_for_selector('.connection[data-kind="live"]')
    held: list[Route] = []
    await page.route("**/v1/**", lambda route: held.append(route))
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # it looks at once
    await page.wait_for_selector('.connection:not([data-kind="live"])')
    for route in held:
        await route.continue_()
    await page.wait_for_selector('.connection[data-kind="live"]')
    await page.unroute("**/v1/**")

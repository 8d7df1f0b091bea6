"""The page and what is hostile: texts that would take for ever, values that lie about themselves, what hides."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support_backend import Log, event, running_backend, text_delta, token_of
from support_page import shown, sign_in, static_pages
from tether import events as ev
from tether.bus import NatsBus

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = pytest.mark.timeout(120)
MOST = 200_000  # characters that are looked at for markup
LONG_MS = 2000  # linear rules take a hundredth of it, quadratic ones half a minute
SLOW = {
    "heading, spaces": ("# a" + " " * MOST)[: MOST - 2] + "#x",
    "heading, marks": ("# a " + "#" * MOST)[: MOST - 1] + "x",
    "fence, spaces": ("~~~" + " " * MOST)[: MOST - 1] + "`",
    "fence, tildes": "~" * (MOST - 1) + "`",
    "ticks": "`" * MOST,
    "runs of ticks": "".join("`" * size + "x" for size in range(1, 600))[:MOST],
    "address, full stops": "http://a" + ("." * 1990 + " http://a") * 99,
    "brackets": "[" * MOST,
    "labels": "[a](" * (MOST // 4),
    "stars": ("*a" * MOST)[:MOST],
    "rule": "- " * (MOST // 2 - 1) + "x",
    "list": "- a\n" * (MOST // 40),
    "quotes": "> " * (MOST // 2),
}
DRAW = """async (texts) => {
  const { markdown } = await import("/static/markdown.js");
  markdown("# warm `up`");
  return Object.fromEntries(Object.entries(texts).map(([name, text]) => {
    const began = performance.now();
    markdown(text);
    return [name, performance.now() - began];
  }));
}"""


async def test_no_text_of_an_agent_takes_longer_to_draw_than_its_length_says(page: Page) -> None:
    await static_pages(page)
    took: dict[str, float] = await page.evaluate(DRAW, SLOW)
    assert {name: round(ms) for name, ms in took.items() if ms > LONG_MS} == {}


async def test_headings_fences_code_and_addresses_are_still_what_they_are(page: Page) -> None:
    await static_pages(page)
    told: list[str] = await page.evaluate(
        """async (texts) => {
          const { markdown } = await import("/static/markdown.js");
          return texts.map((text) => {
            const node = document.createElement("div");
            node.append(markdown(text));
            return node.innerHTML.replaceAll(/ (dir|tabindex|role|target|rel|title)="[^"]*"/g, "");
          });
        }""",
        ["## a b ##", "# c#", "# #", "~~~~ py x\nd\n~~~~", "```e\nf\n```", "``g ` h``", "see http://i.j/k?, l", "``m`"],
    )
    assert told == [
        '<p class="heading" data-level="2">a b</p>',
        '<p class="heading" data-level="1">c#</p>',
        '<p class="heading" data-level="1">#</p>',
        '<pre aria-label="code, py"><code>d</code></pre>',
        '<pre aria-label="code, e"><code>f</code></pre>',
        "<p><code>g ` h</code></p>",
        '<p>see <a href="http://i.j/k">http://i.j/k</a>?, l</p>',
        "<p>`<code>m</code></p>",
    ]


async def test_what_hides_or_reorders_is_told_as_its_code_where_it_is_judged(page: Page) -> None:
    await static_pages(page)
    hidden = [0xAD, 0x34F, 0x61C, 0x115F, 0x180E, 0x200B, 0x200D, 0x202E, 0x2028, 0x2066, 0x3164, 0xFFA0, 0xFFF9]
    hidden += [0x1B, 0x7F, 0x9B, 0xFEFF, 0xE0041, 0xE0100]
    told: list[str] = await page.evaluate(
        """async (points) => {
          const { plain } = await import("/static/dom.js");
          return points.map((point) => plain(`a${String.fromCodePoint(point)}b`));
        }""",
        hidden,
    )
    for point, text in zip(hidden, told, strict=True):
        units = chr(point).encode("utf-16-be")
        codes = "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
        assert text == f"a{codes}b", hex(point)


SCRIPT = '<script>window.owned = 1</script><img src=x onerror="window.owned = 1"><svg onload="window.owned = 1">'
SCHEMES = ("javascript", "JaVaScRiPt", "vbscript", "data:text/html,x", "javascript&colon;", "java\tscript", "file")
LINKS = "\n\n".join(f"[{word}]({word}:window.owned=1)" for word in SCHEMES)
LYING: dict[str, Any] = {"toString": 1, "valueOf": 1, "toJSON": "x", "__proto__": {"owned": 1}, "constructor": SCRIPT}


async def test_hostile_output_neither_runs_nor_stops_the_page(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    async with running_backend(bus, [tenant], tmp_path) as running:
        log = Log(bus, tenant)
        await log.prompt("q1", "r1", "e1", SCRIPT)
        question = {"id": "__proto__", "question": SCRIPT, "options": [{"label": LYING, "description": LYING}, LYING]}
        asked = {"interaction": "constructor", "kind": "question", "questions": [question]}
        usage = {"turn": "__proto__", "input_tokens": 7}
        events = [
            log.started("e1"),
            event(2, ev.TEXT_COMPLETED, {"segment": "__proto__", "text": f"{SCRIPT}\n\n{LINKS}"}),
            event(3, ev.TOOL_STARTED, {"tool": "__proto__", "name": SCRIPT, "input": LYING}),
            event(4, ev.TOOL_COMPLETED, {"tool": "__proto__", "status": "ok", "output": LYING}),
            event(5, ev.USAGE, usage),
            event(6, ev.USAGE, usage),
            event(7, ev.INTERACTION_REQUESTED, asked),
            event(8, ev.RAW, {"stream": "stdout", "preview": SCRIPT, "bytes": 3, "why": SCRIPT}),
            text_delta(9, "\x1b[31m\u202ethe end", segment="constructor"),
        ]
        await log.frame("e1", [events[0]])
        await sign_in(page, running.url, token_of(tenant), "/c/c1")
        await page.wait_for_selector('.connection[data-kind="live"]')
        await log.frame("e1", events[1:])
        await page.wait_for_selector(".stream >> text=the end")
        await page.wait_for_selector('.ask[data-state="pending"] fieldset')
        await log.note(ev.RESPONSE_FAILED, "q2/f", {"request": "q2", "code": "constructor", "detail": SCRIPT})
        await page.wait_for_selector("text=This message came to nothing.")
        assert "native code" not in await shown(page)
        assert "7 in" in await page.inner_text(".response .usage")
        hrefs: list[str] = await page.evaluate("[...document.querySelectorAll('.log a')].map((one) => one.href)")
        assert hrefs == []
        await page.reload()
        await page.wait_for_selector('.ask[data-state="pending"] fieldset')
        await page.click(".tool summary")
        await page.wait_for_selector(".tool pre >> text=toString")
        assert await page.evaluate("[window.owned, {}.owned, Object.prototype.owned]") == [None, None, None]
        assert not [text for text in errors if "Security Policy" in text]


async def test_a_time_that_is_none_costs_nothing_but_itself(page: Page) -> None:
    await static_pages(page)
    told = await page.evaluate(
        """async (times) => {
          const { time } = await import("/static/dom.js");
          return times.map((at) => time(at).textContent);
        }""",
        [1e300, -1e300, "x", 8.64e15 + 1, None],
    )
    assert told == ["–"] * 5

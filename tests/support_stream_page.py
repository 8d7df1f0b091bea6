"""A page that reads a conversation: by a plain `EventSource`, or by the module `/static/tether.js`.

The page is a document of the service's own origin, so its policy and its Origin are those of the real page. What a
reader was told is kept in the page (`got`): its events' keys in order, and everything else by kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from support_backend import Log, eventually, text_delta, token_of

if TYPE_CHECKING:
    from playwright.async_api import Page

KEY = "(event) => event.execution ? `${event.execution}/${event.ordinal}` : event.id"
_FOLLOW = """async ([conversation, token, transport, options, client]) => {
  const { TetherClient } = await import("/static/tether.js");
  const key = KEY;
  window.client = new TetherClient({ token, transport, ...client });
  const got = window.got = { events: [], replays: [], states: [], histories: [], problems: [], lives: 0, ends: [],
    generations: [] };
  window.sub = window.client.follow(conversation, {
    ...options,
    onHistory: (history, why) => got.histories.push({ why, history }),
    onEvent: (event) => {
      got.events.push(key(event));
      got.replays.push(event.replay);
      got.generations.push(window.sub.generation);
    },
    onLive: () => got.lives++,
    onProblem: (problem) => got.problems.push(problem.code),
    onState: (state, detail) => got.states.push([state, detail.error?.code ?? null]),
    onEnd: (end) => got.ends.push(end),
  });
}""".replace("KEY", KEY)
_EVENT_SOURCE = """([url]) => {
  const key = KEY;
  const got = window.got = { events: [], opened: 0, live: 0, errors: 0, last: null };
  const source = window.source = new EventSource(url);
  source.onmessage = (message) => {
    got.events.push(key(JSON.parse(message.data)));
    got.last = message.lastEventId;
  };
  source.addEventListener("open", (event) => { if (event.data) got.opened++; });
  source.addEventListener("live", (event) => { got.live++; got.last = event.lastEventId; });
  source.onerror = () => got.errors++;
}""".replace("KEY", KEY)


async def visit(page: Page, url: str) -> None:
    """A document of this origin that does nothing by itself."""
    answer = await page.goto(f"{url}/static/tether.js")
    assert answer is not None and answer.status == 200


async def follow(
    page: Page, tenant: str, transport: str, *, token: str | None = None, conversation: str = "c1", **options: Any
) -> None:
    """Begin to follow by the module. `heartbeat_ms` goes to the client."""
    client = {"heartbeatMs": options.pop("heartbeat_ms")} if "heartbeat_ms" in options else {}
    await page.evaluate(_FOLLOW, [conversation, token or token_of(tenant), transport, options, client])


async def ticket(page: Page, tenant: str, conversation: str = "c1") -> str:
    """As a page gets one."""
    found = await page.evaluate(
        """async ([conversation, token]) => {
          const { TetherClient } = await import("/static/tether.js");
          return (await new TetherClient({ token }).ticket(conversation)).ticket;
        }""",
        [conversation, token_of(tenant)],
    )
    return str(found)


async def event_source(page: Page, url: str) -> None:
    """Begin to follow by an EventSource at this path and query."""
    await page.evaluate(_EVENT_SOURCE, [url])


async def got(page: Page) -> dict[str, Any]:
    value: dict[str, Any] = await page.evaluate("window.got")
    return value


async def wait_for(page: Page, condition: str, *, timeout_s: float = 30.0) -> None:
    """Until this expression over `got` and `sub` is true."""
    from playwright.async_api import TimeoutError as PlaywrightTimeoutError

    try:
        expression = f"() => {{ const {{ got, sub }} = window; return {condition}; }}"
        await page.wait_for_function(expression, timeout=timeout_s * 1000)
    except PlaywrightTimeoutError:
        told = {name: value[-5:] if isinstance(value, list) else value for name, value in (await got(page)).items()}
        raise AssertionError(f"{condition}, where the last of each is {told}") from None


async def state(page: Page) -> str:
    return str(await page.evaluate("window.sub.state"))


async def write(log: Log, execution: str, first: int, last: int, *, size: int = 3) -> None:
    """Text events `first..last` in frames of `size`."""
    for start in range(first, last + 1, size):
        numbers = range(start, min(start + size, last + 1))
        await log.frame(execution, [text_delta(n, "x", offset=n - 2) for n in numbers])


def keys(execution: str, ordinals: Sequence[int]) -> list[str]:
    return [f"{execution}/{n}" for n in ordinals]


async def freeze(page: Page, what: str) -> None:
    """`frozen`, as a browser suspends a tab, or `active`."""
    session = await page.context.new_cdp_session(page)
    await session.send("Page.setWebLifecycleState", {"state": what})
    await session.detach()


async def silence(seconds: float) -> None:
    """Time that must pass for a silence to be one: nothing can be waited for."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds

    async def passed() -> bool:
        return loop.time() >= end_s

    await eventually(passed, "time passes")

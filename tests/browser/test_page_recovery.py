"""The page while the rows it was shown are repaired: the gap is told once, shown text stays, what was missing comes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support_backend import Log, ensure_tenants, event, running_backend, token_of
from support_page import shown, sign_in
from support_snapshots import Collector, serving, snapshot_from
from tether import events as ev
from tether import subjects
from tether.bus import NatsBus

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = pytest.mark.timeout(120)


async def test_what_was_repaired_is_shown_in_the_open_page_and_the_gap_goes(
    page: Page, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    """L6 in the page."""
    await ensure_tenants(bus, [tenant])
    log = Log(bus, tenant)
    await log.own("e1")
    await log.prompt("q1", "r1", "e1")
    events = [
        log.started("e1"),
        event(2, ev.TEXT_COMPLETED, {"segment": "a", "text": "what was evicted"}),
        event(3, ev.TEXT_COMPLETED, {"segment": "b", "text": "what was shown"}),
    ]
    await log.frame("e1", events[:2])
    last = await log.frame("e1", events[2:])
    await bus.purge(subjects.events_stream(tenant), log.subject("e1"), up_to=last)
    async with serving(Collector(bus, log)) as collector, running_backend(bus, [tenant], tmp_path) as backend:
        await backend.projected("c1", "e1", 3)
        await sign_in(page, backend.url, token_of(tenant), "/c/c1")
        await page.wait_for_selector(".text >> text=what was shown")
        await page.wait_for_selector(".item.gap")
        assert await page.locator(".item.gap").count() == 1
        collector.snapshot = snapshot_from(log, "e1", events)
        await collector.register()
        backend.deps.projectors[tenant].writer.marked.set()
        await page.wait_for_selector(".text >> text=what was evicted")
        await page.wait_for_function("document.querySelectorAll('.item.gap').length === 0")
        text = await shown(page)
        assert text.count("what was shown") == 1 and text.count("what was evicted") == 1
        assert text.index("what was evicted") < text.index("what was shown")

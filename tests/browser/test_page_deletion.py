"""The page exports a conversation and deletes it, after it has asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support_backend import Backend, Log, ended, ensure_tenants, event, eventually, running_backend, token_of
from support_page import assert_accessible, sign_in
from tether import events as ev
from tether.bus import NatsBus
from tether.deletion import deletion_of
from tether.export_format import ConversationExport

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def backend(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[Backend]:
    await ensure_tenants(bus, [tenant])
    async with running_backend(bus, [tenant], tmp_path) as running:
        yield running


async def test_a_conversation_is_exported_and_deleted_once_the_reader_agrees(
    page: Page, backend: Backend, bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    log = Log(bus, tenant)
    await log.own("e1")
    await log.prompt("q1", "r1", "e1", "water the roses")
    said = {"segment": "s1", "text": "they are watered"}
    await log.frame("e1", [log.started("e1"), event(2, ev.TEXT_COMPLETED, said), *ended(3)])
    await log.own(None)
    await backend.projected("c1", "e1", 4)
    await sign_in(page, backend.url, token_of(tenant), "/c/c1")
    await page.wait_for_selector('.connection[data-kind="live"]')
    await page.get_by_text("Export, delete").click()
    async with page.expect_download() as started:
        await page.get_by_role("button", name="Export as JSON").click()
    file = tmp_path / "kept.json"
    download = await started.value
    assert download.suggested_filename == "c1.json"
    await download.save_as(file)
    assert ConversationExport.model_validate_json(file.read_bytes()).conversation == "c1"

    await page.get_by_role("button", name="Delete…").click()
    await page.get_by_role("button", name="Keep it").click()
    assert await deletion_of(bus, tenant, "c1") is None
    await page.get_by_role("button", name="Delete…").click()
    await assert_accessible(page)
    await page.get_by_role("button", name="Delete it").click()

    async def ordered() -> bool:
        return await deletion_of(bus, tenant, "c1") is not None

    await eventually(ordered, "the order")
    await page.wait_for_url("**/#/")

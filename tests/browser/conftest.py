"""Browser tests share one Chromium (see `support_browser`)."""

from __future__ import annotations

from support_browser import browser, chromium, page

__all__ = ["browser", "chromium", "page"]

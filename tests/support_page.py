"""The page in tests: its files without a backend, signing in, what a screen reader and an eye would meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tether_backend.http import web

if TYPE_CHECKING:
    from playwright.async_api import Page, Route

ORIGIN: Final = "http://page.invalid"
WAIT_MS: Final = 20_000


async def static_pages(page: Page) -> None:
    """The page's files under an origin of their own, with nothing behind them; an empty document to begin with."""

    async def answer(route: Route) -> None:
        name = route.request.url.removeprefix(ORIGIN).removeprefix("/static/").removeprefix("/")
        if name == "":
            await route.fulfill(body="<!doctype html><title>empty</title>", content_type="text/html")
            return
        file = web.load(name)
        await route.fulfill(body=file.data, content_type=file.type)

    await page.route(f"{ORIGIN}/**", answer)
    await page.goto(f"{ORIGIN}/")


async def sign_in(page: Page, url: str, token: str, path: str = "/") -> None:
    """By the fragment, as `tether page --sign-in` gives it; then to a view."""
    page.set_default_timeout(WAIT_MS)
    await page.goto(f"{url}/#token={token}")
    await page.wait_for_selector(".shell")
    if path != "/":
        await page.evaluate("(hash) => { location.hash = hash; }", f"#{path}")


async def send(page: Page, text: str) -> None:
    """Type a message and send it with Enter."""
    await page.fill(".composer textarea", text)
    await page.press(".composer textarea", "Enter")


async def shown(page: Page) -> str:
    """The text of the conversation as it is shown."""
    return str(await page.inner_text(".log"))


# Every control has a name, every label its control, ids are unique, one main, headings, images named.
_NAMES = """() => {
  const found = [];
  const visible = (node) => node.checkVisibility({ visibilityProperty: true });
  const text = (node) => (node?.textContent ?? "").trim();
  const named = (node) => text(node) || node.getAttribute("aria-label") || node.title
    || (node.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => text(document.getElementById(id))).join("")
    || [...(node.labels ?? [])].map(text).join("");
  const controls = "button, a[href], input, select, textarea, summary, dialog, [role=region], nav";
  for (const node of document.querySelectorAll(controls)) {
    if (visible(node) && !named(node)) found.push(`no name: ${node.outerHTML.slice(0, 160)}`);
  }
  const seen = new Set();
  for (const { id } of document.querySelectorAll("[id]")) {
    if (seen.has(id)) found.push(`two of the id ${id}`);
    seen.add(id);
  }
  for (const node of document.querySelectorAll("[aria-labelledby], [aria-describedby]")) {
    const named = ["aria-labelledby", "aria-describedby"].map((name) => node.getAttribute(name) ?? "").join(" ");
    for (const id of named.trim().split(/\\s+/)) {
      if (!document.getElementById(id)) found.push(`nothing has the id ${id}`);
    }
  }
  if ([...document.querySelectorAll("main")].length !== 1) found.push("not one main");
  if ([...document.querySelectorAll("h1, h2")].filter(visible).length === 0) found.push("no heading");
  if (!document.documentElement.lang) found.push("no language");
  for (const node of document.querySelectorAll("[tabindex]")) if (node.tabIndex > 0) found.push("a positive tabindex");
  return found;
}"""

# The contrast of each visible text with what lies behind it: at least 4.5, 3 for large text (WCAG AA).
_CONTRAST = """() => {
  const parse = (color) => {
    parse.canvas ??= document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const { canvas } = parse;
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const linear = (one) => one <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color[3] === 1) return color;
      if (color[3] > 0) throw new Error("a ground that is seen through is not computed");
    }
    return [255, 255, 255, 1];
  };
  const found = new Set();
  let texts = 0;
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    const field = node.matches("input, textarea, select");
    if (!(own || field) || !node.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    if (node.closest(".unseen, .skip, :disabled, dialog:not([open]), datalist")) continue;
    texts += 1;
    const style = getComputedStyle(node);
    const [one, other] = [light(parse(style.color)), light(behind(node))].sort((a, b) => b - a);
    const ratio = (one + .05) / (other + .05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const what = `${node.tagName}.${node.className}: ${node.textContent.slice(0, 40)}`;
    if (ratio < (large ? 3 : 4.5)) found.add(`${ratio.toFixed(2)} ${what}`);
  }
  return { texts, found: [...found] };
}"""


async def assert_accessible(page: Page) -> None:
    """What a script can tell: names, ids, landmarks, and the contrast of every text that is shown."""
    found: list[str] = await page.evaluate(_NAMES)
    contrast: dict[str, Any] = await page.evaluate(_CONTRAST)
    assert contrast["texts"] > 3, "nothing was looked at"
    assert [*found, *contrast["found"]] == []


async def assert_fits(page: Page) -> None:
    """No horizontal scrolling: of the document, nor of what scrolls in it (code apart)."""
    wide: list[str] = await page.evaluate(
        """() => [document.documentElement, ...document.querySelectorAll("main, .side, .log, .inner, .top")]
          .filter((node) => node.scrollWidth > node.clientWidth + 1)
          .map((node) => `${node.tagName}.${node.className} ${node.scrollWidth} > ${node.clientWidth}`)"""
    )
    assert wide == [], wide

"""The page at `/` and its files at `/static/{file}`: what the package has, by a fixed list, and nothing else.

The files hold no secret and need no token; the page asks for one and sends it with each request of its own. The Host
check stays (see `edge`). The policy lets the page run its own scripts and talk to its own origin alone: whatever an
agent prints, nothing of it is run, framed, sent elsewhere or loaded from elsewhere. Files are revalidated each time
(`no-cache` and an ETag), so that the modules of two releases never meet in one page.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from tether.errors import Code, ProblemError, problem

router = APIRouter()

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX: Final = "index.html"
FILES: Final = frozenset(
    {
        *("app.js", "asks.js", "composer.js", "conversation.js", "dom.js", "fold.js", "items.js", "lists.js"),
        *("markdown.js", "model.js", "response.js", "sandboxes.js", "tether.js", "tether-wire.js"),
        *("style.css", "favicon.svg"),
    }
)
PATHS: Final = frozenset({"/", *(f"/static/{name}" for name in FILES)})

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    data: bytes
    type: str
    etag: str


@cache
def load(name: str) -> File:
    """A file of the list, read once. Raises KeyError for a name that is not in it."""
    if name != INDEX and name not in FILES:
        raise KeyError(name)
    data = importlib.resources.files("tether_backend").joinpath("web", name).read_bytes()
    return File(data, _TYPES[name.rpartition(".")[2]], f'"{hashlib.sha256(data).hexdigest()[:32]}"')


def matches(header: str | None, etag: str) -> bool:
    """Whether `If-None-Match` names this version: weak comparison, as a cache may have made it weak."""
    if header is None:
        return False
    return header.strip() == "*" or etag in {one.strip().removeprefix("W/") for one in header.split(",")}


def answer(request: Request, name: str) -> Response:
    """200 with the file, or 304."""
    file = load(name)
    headers = {**_HEADERS, "ETag": file.etag}
    if matches(request.headers.get("if-none-match"), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers={**headers, "Content-Type": file.type})


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def index(request: Request) -> Any:
    return answer(request, INDEX)


@router.api_route("/static/{file}", methods=["GET", "HEAD"], include_in_schema=False)
async def static(file: str, request: Request) -> Any:
    if file not in FILES:
        raise ProblemError(problem(Code.NOT_FOUND, "file: the page has none of this name"))
    return answer(request, file)

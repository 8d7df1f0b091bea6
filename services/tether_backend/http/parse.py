"""Reading requests: bodies as bounded strict JSON, pages, the control id; every error names its field."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Annotated, Any, Final, TypeVar

from fastapi import Depends, Path, Query, Request
from pydantic import BaseModel, ValidationError

from tether.api import IDEMPOTENCY_HEADER, PAGE_DEFAULT, PAGE_MAX
from tether.errors import InvalidError
from tether.ids import TOKEN_PATTERN, check_token
from tether.jsonsafe import loads_object
from tether.limits import HTTP_BODY_BYTES_MAX
from tether.prompt import invalid
from tether_backend.config import Principal
from tether_backend.runtime import Deps

ModelT = TypeVar("ModelT", bound=BaseModel)
_PAGE_CHARS_MAX: Final = 256

ConversationId = Annotated[str, Path(pattern=TOKEN_PATTERN)]
ExecutionId = Annotated[str, Path(pattern=TOKEN_PATTERN)]
Limit = Annotated[int, Query(ge=1, le=PAGE_MAX)]
LIMIT_DEFAULT: Final = PAGE_DEFAULT


def _principal(request: Request) -> Principal:
    found: Principal = request.state.principal
    return found


def _deps(request: Request) -> Deps:
    found: Deps = request.app.state.deps
    return found


Who = Annotated[Principal, Depends(_principal)]
With = Annotated[Deps, Depends(_deps)]


async def body_of(request: Request, model: type[ModelT], *, optional: bool = False) -> ModelT:
    """The request's body as `model`. Raises `InvalidError` (`body`, or the field in it), and beyond the limit 413."""
    data = b"".join([chunk async for chunk in request.stream()])
    if not data and optional:
        data = b"{}"
    return model_of(loads_object(data, "body", bytes_max=HTTP_BODY_BYTES_MAX), model)


def model_of(value: dict[str, Any], model: type[ModelT]) -> ModelT:
    """Raises `InvalidError` naming the field in the body."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None


def control_id_of(request: Request, in_body: str | None) -> str | None:
    """The client's control id: the header, or the body's; both must agree."""
    header = request.headers.get(IDEMPOTENCY_HEADER)
    if header is None:
        return in_body
    check_token(header, f"header.{IDEMPOTENCY_HEADER}")
    if in_body is not None and in_body != header:
        raise InvalidError("control_id", f"must equal the header {IDEMPOTENCY_HEADER}, or be left out")
    return header


def encode_page(position: tuple[int, str] | None) -> str | None:
    if position is None:
        return None
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def decode_page(text: str | None) -> tuple[int, str] | None:
    """A page token that `encode_page` made. Raises `InvalidError`."""
    if text is None:
        return None
    error = InvalidError("query.page", "must be a next_page that this list gave, unchanged")
    if len(text) > _PAGE_CHARS_MAX:
        raise error
    try:
        value = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise error from None
    match value:
        case [int() as at, str() as name] if 0 <= at < 2**62:
            return at, check_token(name, "query.page")
        case _:
            raise error

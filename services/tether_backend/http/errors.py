"""The one place where errors become HTTP: RFC 9457 problem documents, for unknown routes and methods too."""

from __future__ import annotations

import re
from typing import Any, Final

import pydantic_core
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tether.api import PROBLEM_TYPE
from tether.errors import BusError, Code, FieldProblem, MessageTooLargeError, Problem, ProblemError, problem
from tether.refusals import detail_of, problems_of

_log = structlog.get_logger("tether.http")
_RETRY_AFTER_S = 1.0
_METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})


class ProblemResponse(Response):
    """An unread rest of the request's body is thrown away as it comes: a connection that were closed instead would be
    reset, and its client never saw the answer."""

    media_type = PROBLEM_TYPE

    def __init__(self, what: Problem, *, headers: dict[str, str] | None = None) -> None:
        body = {"type": what.type, **what.model_dump(mode="json", exclude_none=True)}
        extra = dict(headers or {})
        if what.retry_after_s is not None:
            extra["Retry-After"] = str(max(1, round(what.retry_after_s)))
        if what.code is Code.UNAUTHENTICATED:
            extra["WWW-Authenticate"] = "Bearer"
        super().__init__(pydantic_core.to_json(body), status_code=what.status, headers=extra)


def body_too_large(bytes_max: int) -> Problem:
    what = problem(
        Code.INVALID,
        f"body: must be at most {bytes_max} bytes",
        fields=(FieldProblem(field="body", remedy=f"must be at most {bytes_max} bytes"),),
    )
    return what.model_copy(update={"status": 413})


def of_bus(error: BusError) -> Problem:
    """What the caller is told of a bus failure: nothing of subjects or servers."""
    if isinstance(error, MessageTooLargeError):
        remedy = error.detail
        return problem(Code.INVALID, remedy, fields=(FieldProblem(field="body", remedy=remedy),))
    return problem(Code.RUNTIME_UNAVAILABLE, "the message bus does not answer for now", retry_after_s=_RETRY_AFTER_S)


def of_database(error: Exception) -> Problem:
    _log.warning("http_database_failed", detail=type(error).__name__)
    return problem(Code.RUNTIME_UNAVAILABLE, "the database does not answer for now", retry_after_s=_RETRY_AFTER_S)


FAILURES: Final = (ProblemError, BusError, SQLAlchemyError)  # what a request may come to, each with its problem


def of_failure(error: ProblemError | BusError | SQLAlchemyError) -> Problem:
    """The problem that the caller is told, over HTTP and over a WebSocket."""
    match error:
        case ProblemError():
            return error.problem
        case BusError():
            _log.warning("http_bus_failed", detail=error.detail, subject=error.subject)
            return of_bus(error)
        case SQLAlchemyError():
            return of_database(error)


def failed_here() -> Problem:
    """What nobody foresaw: it is logged where it is caught."""
    what = problem(Code.RUNTIME_UNAVAILABLE, "the request failed here; it is logged", retryable=True)
    return what.model_copy(update={"status": 500})


def of_validation(error: RequestValidationError) -> Problem:
    """Path, query and header parameters: `path.conversation`, `query.limit`. Nothing of the input is echoed."""
    fields = problems_of(error.errors())
    return problem(Code.INVALID, detail_of(fields), fields=fields)


async def _of_failure(_: Request, error: Exception) -> Response:
    assert isinstance(error, FAILURES)
    return ProblemResponse(of_failure(error))


async def _of_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return ProblemResponse(of_validation(error))


def no_such_path() -> Problem:
    return problem(Code.NOT_FOUND, "no such path; see /openapi.json")


def _methods_of(app: FastAPI, path: str) -> set[str]:
    """What the document has for a path: the framework names the methods of one of its routes only."""
    found: set[str] = set()
    for template, item in app.openapi()["paths"].items():
        for method, operation in item.items():
            if method.upper() in _METHODS and re.fullmatch(_pattern_of(template, operation), path):
                found.add(method.upper())
    return found


def _pattern_of(template: str, operation: dict[str, Any]) -> str:
    """A parameter is a segment; one of a few words is one of these; an interaction's id may have slashes in it."""
    pattern = re.escape(template).replace(r"\{interaction\}", ".+")
    for parameter in operation.get("parameters", ()):
        words = parameter.get("schema", {}).get("enum")
        if parameter.get("in") == "path" and words:
            pattern = pattern.replace(rf"\{{{parameter['name']}\}}", f"(?:{'|'.join(map(re.escape, words))})")
    return re.sub(r"\\\{[a-z_]+\\\}", "[^/]+", pattern)


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        what = problem(
            Code.INVALID,
            "method: this path does not take it",
            fields=(FieldProblem(field="method", remedy="see /openapi.json for the methods of this path"),),
        )
        allow = ", ".join(sorted(_methods_of(request.app, request.url.path)))
        return ProblemResponse(what.model_copy(update={"status": 405}), headers={"Allow": allow} if allow else None)
    return ProblemResponse(no_such_path())


async def _of_hang_up(_: Request, error: Exception) -> Response:
    """The client left in the middle of its body: nobody reads this, and nothing failed here."""
    return ProblemResponse(problem(Code.INVALID, "body: broke off").model_copy(update={"status": 400}))


async def _of_anything(request: Request, error: Exception) -> Response:
    """The process boundary: logged with its traceback, told without it."""
    _log.error("http_failed", path=request.url.path, exc_info=error)
    return ProblemResponse(failed_here())


def install(app: FastAPI) -> None:
    for kind in FAILURES:
        app.add_exception_handler(kind, _of_failure)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(ClientDisconnect, _of_hang_up)
    app.add_exception_handler(Exception, _of_anything)

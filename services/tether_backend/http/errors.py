"""The one place where errors become HTTP: RFC 9457 problem documents, for unknown routes and methods too."""

from __future__ import annotations

import pydantic_core
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tether.api import PROBLEM_TYPE
from tether.errors import BusError, Code, FieldProblem, MessageTooLargeError, Problem, ProblemError, problem

_log = structlog.get_logger("tether.http")
_RETRY_AFTER_S = 1.0


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


def of_validation(error: RequestValidationError) -> Problem:
    """Path, query and header parameters: `path.conversation`, `query.limit`. Nothing of the input is echoed."""
    fields = tuple(
        FieldProblem(field=".".join(str(part) for part in item["loc"]), remedy=str(item["msg"]))
        for item in error.errors()
    )
    first = fields[0]
    return problem(Code.INVALID, f"{first.field}: {first.remedy}", fields=fields)


async def _of_problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return ProblemResponse(error.problem)


async def _of_bus(_: Request, error: Exception) -> Response:
    assert isinstance(error, BusError)
    _log.warning("http_bus_failed", detail=error.detail, subject=error.subject)
    return ProblemResponse(of_bus(error))


async def _of_database(_: Request, error: Exception) -> Response:
    return ProblemResponse(of_database(error))


async def _of_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return ProblemResponse(of_validation(error))


def no_such_path() -> Problem:
    return problem(Code.NOT_FOUND, "no such path; see /openapi.json")


async def _of_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        what = problem(
            Code.INVALID,
            "method: this path does not take it",
            fields=(FieldProblem(field="method", remedy="see /openapi.json for the methods of this path"),),
        )
        allow = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
        return ProblemResponse(what.model_copy(update={"status": 405}), headers=allow)
    return ProblemResponse(no_such_path())


async def _of_anything(request: Request, error: Exception) -> Response:
    """The process boundary: logged with its traceback, told without it."""
    _log.error("http_failed", path=request.url.path, exc_info=error)
    what = problem(Code.RUNTIME_UNAVAILABLE, "the request failed here; it is logged", retryable=True)
    return ProblemResponse(what.model_copy(update={"status": 500}))


def install(app: FastAPI) -> None:
    app.add_exception_handler(ProblemError, _of_problem)
    app.add_exception_handler(BusError, _of_bus)
    app.add_exception_handler(SQLAlchemyError, _of_database)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _of_anything)

"""The HTTP application over its dependencies. Starting and stopping them is `tether_backend.service`'s."""

from __future__ import annotations

import importlib.metadata

from fastapi import FastAPI
from starlette.types import ASGIApp

from tether_backend.http import (
    conversations,
    deletions,
    errors,
    executions,
    export,
    messages,
    openapi,
    openapi_routes,
    operations,
    quarantine,
    sandboxes,
    web,
    webhooks,
    ws,
)
from tether_backend.http.edge import Edge
from tether_backend.http.traced import Traced
from tether_backend.runtime import Deps


def create_app(deps: Deps) -> ASGIApp:
    """The whole edge: host, origin, token and size checks around the routes."""
    return Edge(Traced(build(deps)), deps.admission, deps.metrics)


def build(deps: Deps | None) -> FastAPI:
    """The routes alone (with None: only to export `/openapi.json`)."""
    app = FastAPI(
        title="Tether",
        version=deps.version if deps is not None else importlib.metadata.version("tether"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.deps = deps
    errors.install(app)
    for module in (
        messages,
        conversations,
        deletions,
        executions,
        export,
        sandboxes,
        quarantine,
        operations,
        web,
        webhooks,
        ws,
    ):
        app.include_router(module.router)
    openapi.install(app, openapi_routes.routes, openapi_routes.ABOUT)
    return app

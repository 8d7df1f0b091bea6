"""`/healthz` (the loop turns), `/readyz` (bus, logs, projections, database), `/metrics`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from tether.api import Health
from tether_backend.http.parse import With

router = APIRouter()


@router.get("/healthz", response_model=Health)
async def healthz() -> Any:
    return Health(status="ok")


@router.get("/readyz", response_model=Health)
async def readyz(deps: With) -> Any:
    checks = {"bus": deps.bus.connected, "database": await deps.database.alive()}
    for tenant, feed in deps.feeds.items():
        checks[f"log.{tenant}"] = feed.ready.is_set()
    for tenant, projector in deps.projectors.items():
        checks[f"projection.{tenant}"] = projector.bound.is_set()
    ready = all(checks.values())
    body = Health(status="ok" if ready else "unavailable", checks=checks)
    return JSONResponse(body.model_dump(), status_code=200 if ready else 503)


@router.get("/metrics", response_class=Response)
async def metrics(deps: With) -> Response:
    return Response(deps.metrics.render(), media_type=CONTENT_TYPE_LATEST)

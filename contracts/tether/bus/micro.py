"""Answers `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`, so that `nats micro ls` shows what runs.

One instance per service name and connection; each `serve` adds an endpoint. Statistics count since the endpoint began.
A user that may not subscribe to `$SRV.>` serves all the same, unlisted.
"""

from __future__ import annotations

import json
import re
import secrets
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import structlog

from tether.bus.connection import Connection
from tether.errors import PermissionDeniedError
from tether.serving import Endpoint

_log = structlog.get_logger("tether.bus")
_TYPE: Final = "io.nats.micro.v1."
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")


def product_version() -> str:
    try:
        return version("tether")
    except PackageNotFoundError:
        return "0.0.0"


class MicroService:
    """The responder of one service name on one connection."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._started = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self._id = secrets.token_hex(8)
        self._name = _NAME.sub("-", name)
        self._sids: list[int] = []
        self.endpoints: list[Endpoint] = []

    def start(self) -> None:
        for verb in ("PING", "INFO", "STATS"):
            for address in ("", f".{self._name}", f".{self._name}.{self._id}"):
                self._sids.append(self._connection.wire.sub(f"$SRV.{verb}{address}", "", self._deliver, self._refused))

    def stop(self) -> None:
        for sid in self._sids:
            self._connection.wire.unsub(sid)
        self._sids.clear()

    def _refused(self, error: PermissionDeniedError) -> None:
        _log.debug("bus_micro_not_permitted", service=self._name, error=str(error))

    def _deliver(self, subject: bytes, reply: bytes, raw: bytes | None, data: bytes) -> None:
        if reply and self._connection.connected:
            answer = self._answer(subject.split(b".")[1].decode())
            self._connection.send(reply.decode(), json.dumps(answer).encode())

    def _answer(self, verb: str) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "type": f"{_TYPE}{verb.lower()}_response",
            "name": self._name,
            "id": self._id,
            "version": product_version(),
            "metadata": {},
        }
        if verb == "INFO":
            answer["description"] = f"Tether {self._name}"
            answer["endpoints"] = [endpoint.info() for endpoint in self.endpoints]
        elif verb == "STATS":
            answer["started"] = self._started
            answer["endpoints"] = [endpoint.stats() for endpoint in self.endpoints]
        return answer


class Registry:
    """The services of one connection by name."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._services: dict[str, MicroService] = {}

    def add(self, name: str, subject: str, queue: str) -> Endpoint:
        service = self._services.get(name)
        if service is None:
            service = self._services[name] = MicroService(self._connection, name)
            if self._connection.config.listed:
                service.start()
        endpoint = Endpoint(subject, queue)
        service.endpoints.append(endpoint)
        return endpoint

    def remove(self, name: str, endpoint: Endpoint) -> None:
        service = self._services[name]
        service.endpoints.remove(endpoint)
        if not service.endpoints:
            service.stop()
            del self._services[name]

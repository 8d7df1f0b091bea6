"""Apply a topology through the JetStream API, and name what differs. Raw JSON: nothing unknown is dropped.

Idempotent, and safe with several callers at once: a creation that loses the race goes on as an update, an update writes
the same fields as the other's. Each object carries the topology's version in its metadata; an object of a newer version
is left alone. Fields and metadata keys that a topology does not know are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import structlog

from tether.errors import BusError, BusUnavailableError
from tether.topology import VERSION_KEY, ConsumerSpec, StreamSpec, Topology

_log = structlog.get_logger("tether.bus")
STREAM_NOT_FOUND: Final = 10059
CONSUMER_NOT_FOUND: Final = 10014
_SECOND_NS: Final = 1_000_000_000
_EXISTS: Final = frozenset({10058, 10105, 10148})  # stream or consumer there already, with another configuration
_NS_FIELDS: Final = frozenset({"max_age", "duplicate_window", "ack_wait"})
_CALM: Final = frozenset({10047, 10008, 10074, 10005})  # no resources, no quorum, no peers: not the request's fault
_RACES_MAX: Final = 5


class ApiError(Exception):
    """An error answer of the JetStream API that a caller may expect."""

    def __init__(self, subject: str, error: Mapping[str, Any]) -> None:
        super().__init__(f"{subject}: {error.get('description')} [{error.get('err_code')}]")
        self.subject = subject
        self.code = int(error.get("err_code", 0))
        self.description = str(error.get("description", ""))

    def unavailable(self) -> BusUnavailableError:
        return BusUnavailableError(self.description, subject=self.subject, code=self.code)


# subject ($JS.API.…), request → the answer, which has no error. Raises ApiError, BusError.
Api = Callable[[str, Any], Awaitable[dict[str, Any]]]


def stream_config(spec: StreamSpec, version: int) -> dict[str, Any]:
    """The fields that a topology decides, as the server's JSON names them (durations in nanoseconds)."""
    window_s = min(spec.duplicate_window_s, spec.max_age_s) if spec.max_age_s else spec.duplicate_window_s
    config: dict[str, Any] = {
        "name": spec.name,
        "description": spec.description,
        "subjects": list(spec.subjects),
        "retention": spec.retention,
        "storage": "file",
        "max_age": spec.max_age_s * _SECOND_NS,
        "max_bytes": spec.max_bytes,
        "max_msgs_per_subject": spec.max_msgs_per_subject,
        "max_msg_size": spec.max_msg_size_bytes,
        "discard": "new" if spec.discard_new else "old",
        "discard_new_per_subject": spec.discard_new_per_subject,
        "duplicate_window": window_s * _SECOND_NS,
        "allow_direct": spec.allow_direct,
        "allow_rollup_hdrs": spec.allow_rollup,
        "allow_msg_ttl": spec.allow_msg_ttl,
        "deny_delete": spec.deny_delete,
        "num_replicas": spec.replicas,
        "metadata": {**dict(spec.metadata), VERSION_KEY: str(version)},
    }
    if spec.republish is not None:
        config["republish"] = {"src": spec.republish.source, "dest": spec.republish.destination}
    return config


def consumer_config(spec: ConsumerSpec, version: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "durable_name": spec.durable,
        "name": spec.durable,
        "description": spec.description,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "replay_policy": "instant",
        "ack_wait": round(spec.ack_wait_s * _SECOND_NS),
        "max_ack_pending": spec.max_ack_pending,
        "max_deliver": spec.max_deliver,
        "metadata": {**dict(spec.metadata), VERSION_KEY: str(version)},
    }
    if spec.filter_subject:
        config["filter_subject"] = spec.filter_subject
    return config


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Field → (expected, found). An absent field is its type's empty value; of metadata only the wanted keys count."""
    differing: dict[str, tuple[Any, Any]] = {}
    for field, expected in wanted.items():
        actual = found.get(field)
        if field == "metadata":
            actual = actual or {}
            for key, value in expected.items():
                if actual.get(key) != value:
                    differing[f"metadata.{key}"] = (value, actual.get(key))
            continue
        if actual is None:
            actual = type(expected)()
        if field == "republish":
            actual = {key: actual.get(key) for key in expected}
        if field == "subjects":
            expected, actual = sorted(expected), sorted(actual)
        if actual != expected:
            differing[field] = (expected, actual)
    return differing


def _version(config: Mapping[str, Any]) -> int:
    text = (config.get("metadata") or {}).get(VERSION_KEY, "0")
    return int(text) if text.isdigit() else 0


def _merged(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**found, **wanted}
    merged["metadata"] = {**(found.get("metadata") or {}), **wanted["metadata"]}
    if "republish" in wanted:
        merged["republish"] = {**(found.get("republish") or {}), **wanted["republish"]}
    return merged


def _sentences(what: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    lines = []
    for field, (expected, actual) in differences(wanted, found).items():
        if field in _NS_FIELDS:
            expected, actual = f"{expected / _SECOND_NS:g} s", f"{actual / _SECOND_NS:g} s"
        lines.append(f"{what}: {field} is {actual!r}, expected {expected!r}")
    return lines


class _Object(ABC):
    """A stream or a consumer: where its info is, how it is made and changed."""

    def __init__(self, what: str, info: str, missing: frozenset[int], wanted: dict[str, Any]) -> None:
        self.what = what
        self.info = info
        self.missing = missing
        self.wanted = wanted

    async def found(self, api: Api) -> dict[str, Any] | None:
        try:
            answer = await api(self.info, None)
        except ApiError as error:
            if error.code in self.missing:
                return None
            raise self._failed(error) from None
        config: dict[str, Any] = answer["config"]
        return config

    async def create(self, api: Api) -> bool:
        """False where somebody else has just made it."""
        try:
            await api(*self._request(self.wanted, create=True))
        except ApiError as error:
            if error.code in _EXISTS:
                return False
            raise self._failed(error) from None
        return True

    async def update(self, api: Api, config: dict[str, Any]) -> None:
        try:
            await api(*self._request(config, create=False))
        except ApiError as error:
            raise self._failed(error) from None

    @abstractmethod
    def _request(self, config: dict[str, Any], *, create: bool) -> tuple[str, dict[str, Any]]:
        """The API subject and the request that make (`create`) or change it."""

    def _failed(self, error: ApiError) -> BusError:
        kind = BusUnavailableError if error.code in _CALM else BusError
        return kind(f"{self.what}: {error.description}", subject=error.subject, code=error.code)


class _Stream(_Object):
    def __init__(self, spec: StreamSpec, version: int) -> None:
        super().__init__(
            f"stream {spec.name}",
            f"$JS.API.STREAM.INFO.{spec.name}",
            frozenset({STREAM_NOT_FOUND}),
            stream_config(spec, version),
        )
        self._name = spec.name

    def _request(self, config: dict[str, Any], *, create: bool) -> tuple[str, dict[str, Any]]:
        return f"$JS.API.STREAM.{'CREATE' if create else 'UPDATE'}.{self._name}", config


class _Consumer(_Object):
    def __init__(self, spec: ConsumerSpec, version: int) -> None:
        super().__init__(
            f"consumer {spec.durable} of stream {spec.stream}",
            f"$JS.API.CONSUMER.INFO.{spec.stream}.{spec.durable}",
            frozenset({CONSUMER_NOT_FOUND, STREAM_NOT_FOUND}),
            consumer_config(spec, version),
        )
        self._spec = spec

    def _request(self, config: dict[str, Any], *, create: bool) -> tuple[str, dict[str, Any]]:
        subject = f"$JS.API.CONSUMER.CREATE.{self._spec.stream}.{self._spec.durable}"
        if config.get("filter_subject"):
            subject += f".{config['filter_subject']}"
        action = "create" if create else "update"
        return subject, {"stream_name": self._spec.stream, "config": config, "action": action}


def _objects(topology: Topology) -> list[_Object]:
    streams = [_Stream(spec, topology.version) for spec in topology.streams]
    return [*streams, *(_Consumer(spec, topology.version) for spec in topology.consumers)]


async def apply(api: Api, topology: Topology) -> None:
    """Raises BusError naming the object where the server refuses (a field that cannot be changed, no resources)."""
    for item in _objects(topology):
        for _ in range(_RACES_MAX):
            found = await item.found(api)
            if found is None:
                if await item.create(api):
                    _log.info("bus_ensured", object=item.what, change="created")
                    break
                continue
            if _version(found) > topology.version or not differences(item.wanted, found):
                break
            await item.update(api, _merged(item.wanted, found))
            changed = sorted(differences(item.wanted, found))
            _log.info("bus_ensured", object=item.what, change="updated", fields=changed)
            break
        else:
            raise BusUnavailableError(f"{item.what} was created and deleted again by others", subject=item.info)


async def diff(api: Api, topology: Topology) -> Sequence[str]:
    lines: list[str] = []
    for item in _objects(topology):
        found = await item.found(api)
        if found is None:
            lines.append(f"{item.what} does not exist")
        else:
            lines.extend(_sentences(item.what, item.wanted, found))
    return lines

"""The container engine, over the docker SDK: every call in a thread, bounded in time, its errors one kind.

The SDK is the extra `docker`; without it this module cannot be imported, and the service says so.
"""

from __future__ import annotations

import asyncio
import functools
import io
import json
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import docker  # type: ignore[import-untyped]
import requests
import structlog
from docker.errors import APIError, DockerException, ImageNotFound, NotFound  # type: ignore[import-untyped]

from tether_agent.core.container import Container, Died
from tether_agent.providers import NotReadyError
from tether_agent.providers.docker_spec import FILES, INIT, LABEL, WORKSPACE

CALL_S: Final = 30.0  # of one request to the engine
ENGINE_WAIT_S: Final = 20.0  # for one that is being started, when the service starts
ENGINE_LOOK_S: Final = 1.0
THREADS: Final = 8
LOG_LINES: Final = 20
EVENTS_MARGIN_S: Final = 5
_CONFLICT: Final = 409
_NEVER: Final = "0001-01-01"
_log = structlog.get_logger("tether_agent")
_T = TypeVar("_T")


class EngineError(NotReadyError):
    """The engine did not do it: it is away, slow, or refuses, and may do it later. `conflict`: the name is taken."""

    def __init__(self, detail: str, *, conflict: bool = False) -> None:
        super().__init__(detail)
        self.conflict = conflict


class ImageMissingError(Exception):
    """The engine does not have the image."""


class Engine:
    """Containers whose label `prefix` is this one's. Raises EngineError throughout."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._client: Any = None
        self._making = threading.Lock()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[[Any], _T]) -> _T:
        """`work` with the SDK's low-level client, in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(self._work, work))

    def _work(self, work: Callable[[Any], _T]) -> _T:
        try:
            with self._making:
                if self._client is None:
                    self._client = docker.from_env(timeout=CALL_S)
            return work(self._client.api)
        except ImageNotFound as error:
            raise ImageMissingError(str(error.explanation)) from None
        except APIError as error:
            detail = str(error.explanation or error)
            raise EngineError(detail, conflict=error.status_code == _CONFLICT) from None
        except (DockerException, requests.RequestException, OSError) as error:
            raise EngineError(f"the container engine does not answer: {type(error).__name__}") from None

    # --- containers ---

    async def create(self, spec: Mapping[str, Any]) -> str:
        """The new container's id. Raises ImageMissingError."""
        return await self._call(lambda api: _create(api, spec))

    async def start(self, container: str) -> None:
        await self._call(lambda api: api.start(container))

    async def put(self, container: str, files: Mapping[str, str]) -> None:
        """Hand files over to a running container, on the standard input of a command in it."""
        data = json.dumps(dict(files)).encode()
        await self._call(lambda api: _put(api, container, data))

    async def signal(self, container: str, name: str) -> None:
        """To its first process; nothing where it does not run."""

        def send(api: Any) -> None:
            try:
                api.kill(container, name)
            except NotFound:
                return
            except APIError as error:
                if error.status_code != _CONFLICT:  # it does not run
                    raise

        await self._call(send)

    async def inspect(self, container: str) -> Container | None:
        """By id or name; None where the engine does not know it."""

        def look(api: Any) -> Container | None:
            try:
                return _container(api.inspect_container(container))
            except NotFound:
                return None

        return await self._call(look)

    async def living(self) -> dict[str, str]:
        """Id and status of every container of ours, whatever its status."""
        filters = {"label": [f"{LABEL}prefix={self._prefix}"]}
        found = await self._call(lambda api: api.containers(all=True, filters=filters))
        return {one["Id"]: one["State"] for one in found}

    async def ours(self, known: Iterable[str]) -> list[Container]:
        """Every container of ours, looked at, with those of the ids `known`. Waits for an engine that is being started,
        but not for ever."""
        deadline_s = asyncio.get_running_loop().time() + ENGINE_WAIT_S
        while True:
            try:
                seen = [await self.inspect(container) for container in {*known, *await self.living()}]
                return [one for one in seen if one is not None]
            except EngineError as error:
                if asyncio.get_running_loop().time() > deadline_s:
                    raise
                _log.warning("engine_awaited", reason=str(error))
            await asyncio.sleep(ENGINE_LOOK_S)

    async def died(self, container: str, since_s: int) -> Died | None:
        """What the engine remembers of the end of a container: it keeps its last few hundred events."""

        def look(api: Any) -> Died | None:
            filters = {"container": container, "event": "die"}
            until_s = int(time.time()) + 1  # the engine waits for a moment that is to come
            found = None
            for event in api.events(since=since_s - EVENTS_MARGIN_S, until=until_s, filters=filters, decode=True):
                if event.get("id") == container:
                    attributes = event.get("Actor", {}).get("Attributes", {})
                    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event.get("time", 0)))
                    found = Died(int(attributes.get("exitCode", -1)), at)
                    break
            return found

        return await self._call(look)

    async def remove(self, container: str) -> None:
        """A container that has ended; nothing where there is none. Its volume stays."""

        def remove(api: Any) -> None:
            try:
                api.remove_container(container)
            except NotFound:
                return

        await self._call(remove)

    async def log(self, container: str) -> str:
        """The last lines that it wrote, for who asks why it does not start."""
        found = await self._call(lambda api: api.logs(container, tail=LOG_LINES))
        return bytes(found).decode("utf-8", "replace").strip()

    # --- volumes ---

    async def volume_there(self, name: str) -> bool:
        def look(api: Any) -> bool:
            try:
                api.inspect_volume(name)
            except NotFound:
                return False
            return True

        return await self._call(look)

    async def make_volume(self, name: str, labels: Mapping[str, str]) -> None:
        await self._call(lambda api: api.create_volume(name, labels=dict(labels)))

    async def read_file(self, image: str, volume: str, path: str, bytes_max: int) -> bytes | None:
        """A file of a volume, through a container that is never started; None where there is none."""
        return await self._call(lambda api: _read_file(api, image, volume, path, bytes_max))


def _create(api: Any, spec: Mapping[str, Any]) -> str:
    arguments = dict(spec)
    host = api.create_host_config(**arguments.pop("host"))
    container: str = api.create_container(**arguments, host_config=host)["Id"]
    return container


def _container(found: Mapping[str, Any]) -> Container:
    state = found["State"]
    return Container(
        id=found["Id"],
        name=found["Name"].lstrip("/"),
        status=state["Status"],
        started_at="" if state["StartedAt"].startswith(_NEVER) else state["StartedAt"],
        finished_at=state["FinishedAt"],
        exit_code=state["ExitCode"],
        out_of_memory=bool(state.get("OOMKilled")),
        labels=tuple(sorted((found["Config"].get("Labels") or {}).items())),
    )


def _put(api: Any, container: str, data: bytes) -> None:
    made = api.exec_create(container, [*INIT, "put", FILES], stdin=True)["Id"]
    stream = api.exec_start(made, socket=True)
    raw = getattr(stream, "_sock", stream)
    try:
        raw.settimeout(CALL_S)
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        told = b""
        while piece := raw.recv(65536):
            told = (told + piece)[-4096:]
    finally:
        stream.close()
        raw.close()
    code = api.exec_inspect(made)["ExitCode"]
    if code != 0:
        # The stream is framed; the frame's head is not text.
        raise EngineError(
            f"files cannot be handed over: exit code {code}: {told[8:].decode('utf-8', 'replace').strip()}"
        )


def _read_file(api: Any, image: str, volume: str, path: str, bytes_max: int) -> bytes | None:
    host = api.create_host_config(mounts=[{"Type": "volume", "Source": volume, "Target": WORKSPACE, "ReadOnly": True}])
    container = api.create_container(image, host_config=host)["Id"]
    try:
        chunks, facts = api.get_archive(container, f"{WORKSPACE}/{path}")
        if facts["size"] > bytes_max:
            return None
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            entry = archive.next()
            stream = None if entry is None else archive.extractfile(entry)
            return None if stream is None else stream.read(bytes_max)
    except NotFound:
        return None
    finally:
        api.remove_container(container)

"""The frame of a service process: logging, traces, metrics, signals, readiness, one boundary for what nobody expected.

`run(main)` gives `main` a `stop` event that SIGTERM and SIGINT set; a service announces readiness itself, by
`ready(settings, …)`, when it is ready. What escapes `main` is logged with its traceback and ends the process with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import structlog
import uvloop

from tether import __version__, metrics, tracing
from tether.settings import EX_CONFIG, ConfigurationError, ServiceSettings

Main = Callable[[asyncio.Event], Awaitable[None]]
LEFTOVER_S: Final = 60.0  # no write takes so long; longer than a writer on a disk that hangs is worth waiting for
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(settings: ServiceSettings, service: str) -> None:
    """structlog to stderr: JSON lines or console; the service's name is bound once.

    Tracebacks are told without local variables: a password or a prompt may be one of them.
    """
    level = _LEVELS[settings.log_level]
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
            if settings.log_format == "json"
            else structlog.processors.StackInfoRenderer(),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, pid=os.getpid())
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")


def ready(settings: ServiceSettings, **facts: Any) -> None:
    """Announce readiness: a log line, and the ready file (written whole, then renamed) where one is configured."""
    facts |= metrics.place()
    structlog.get_logger().info("service_ready", **facts)
    if settings.ready_file is not None:
        write_whole(settings.ready_file, json.dumps({"pid": os.getpid(), **facts}).encode())


def write_whole(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file so that a reader sees all of it or none: temp, fsync, rename, fsync of the folder.

    What writers left that were killed in the midst of it is deleted once it is LEFTOVER_S old, so that it does not add
    up over restarts."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):  # another writer was faster
            if time.time() - leftover.lstat().st_mtime > LEFTOVER_S:
                leftover.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


async def _supervise(main: Main) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    metrics.count_tasks_of(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await main(stop)


def run(main: Main, settings: ServiceSettings, *, service: str) -> int:
    """Run a service until it stops by itself or by signal. Returns the exit code: 78 for a configuration that another
    start would not mend."""
    configure_logging(settings, service)
    tracing.configure(settings, service, __version__)
    try:
        with metrics.serving(settings):
            uvloop.run(_supervise(main))
    except ConfigurationError as error:  # found only while starting: a file that is named, what is installed
        structlog.get_logger().error("service_misconfigured", problems=error.problems)
        return EX_CONFIG
    except Exception:  # noqa: BLE001 - the process boundary
        structlog.get_logger().exception("service_failed")
        return 1
    finally:
        tracing.shutdown()
    return 0

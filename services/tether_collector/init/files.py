"""Files for a collector, handed over on stdin: they stand in no argument, variable or image, only in memory.

`put` takes one JSON object of names and texts, and writes each whole or not at all, mode 0600; ENVIRONMENT comes last,
so that who finds it finds the others. The folder is a file system in memory of the sandbox's own user.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import IO, Final

ENVIRONMENT: Final = "environment.json"  # variables of the collector
BYTES_MAX: Final = 2 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# What a collector takes over of the container's own environment: where things lie, locale, certificates, proxies.
INHERITED: Final = (
    *("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ"),
    *("LD_LIBRARY_PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("NODE_EXTRA_CA_CERTS", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)


class FilesError(Exception):
    """What was handed over cannot be used; names the field and the remedy, no value."""


def put(folder: Path, stream: IO[bytes]) -> None:
    """Write what comes on `stream` into `folder`. Raises FilesError, OSError."""
    data = stream.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise FilesError(f"stdin: must have at most {BYTES_MAX} bytes")
    values = _texts(data, "stdin")
    for name in values:
        if not _NAME.fullmatch(name):
            raise FilesError("stdin: names must be of letters, digits, dot, dash and underscore")
    for name in sorted(values, key=lambda one: (one == ENVIRONMENT, one)):
        _write(folder / name, values[name].encode())


def environment(folder: Path, own: dict[str, str]) -> dict[str, str]:
    """The collector's variables: what it inherits of `own`, then the file. Raises FilesError, OSError."""
    values: dict[str, str] = {name: own[name] for name in INHERITED if name in own}
    with (folder / ENVIRONMENT).open("rb") as file:
        values.update(_texts(file.read(BYTES_MAX), ENVIRONMENT))
    return values


def _texts(data: bytes, what: str) -> dict[str, str]:
    try:
        value = json.loads(data)
    except ValueError:
        raise FilesError(f"{what}: must be JSON") from None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise FilesError(f"{what}: must map names to texts")
    return value


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise

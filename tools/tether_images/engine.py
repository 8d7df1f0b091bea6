"""The docker command. The legacy builder is used: it is there in every engine, and asks no registry for a frontend."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import IO, Final

COMMAND_S: Final = 600.0


class ImageError(Exception):
    """An image cannot be made; says why, and the remedy where there is one."""


def docker(*arguments: str, stdin: IO[bytes] | None = None, cwd: Path | None = None) -> str:
    """Run the command, return what it prints. Raises ImageError."""
    try:
        done = subprocess.run(
            ["docker", *arguments],
            stdin=stdin,
            cwd=cwd,
            env={**os.environ, "DOCKER_BUILDKIT": "0"},
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    except FileNotFoundError:
        raise ImageError("the docker command is missing; install docker.io") from None
    except subprocess.TimeoutExpired:
        raise ImageError(f"docker {arguments[0]} took more than {COMMAND_S:g} s") from None
    if done.returncode != 0:
        raise ImageError(f"docker {arguments[0]}: {tail(done.stderr or done.stdout)}")
    return done.stdout


def tail(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def unavailable() -> str | None:
    """Why no engine can be used; None where one answers."""
    if shutil.which("docker") is None:
        return "the docker command is missing"
    try:
        docker("version", "--format", "{{.Server.Version}}")
    except ImageError as error:
        return tail(str(error), 1)
    return None


def size_bytes(image: str) -> int | None:
    """None where there is no such image."""
    try:
        return int(docker("image", "inspect", "--format", "{{.Size}}", image))
    except ImageError:
        return None


def python_of(image: str) -> str:
    """The version of the image's Python, as `3.13`. Raises ImageError."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return docker("run", "--rm", "--network", "none", "--entrypoint", "python3", image, "-c", code).strip()

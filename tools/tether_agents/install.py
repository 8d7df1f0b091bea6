"""Put the pinned agent CLI into the cache, outside the clone.

Order of steps, all under an exclusive lock of this agent (a second run waits, then finds the work done):

1. an install of the pinned version that tells its version is left alone;
2. folders of earlier runs that were cut off are removed;
3. npm installs into `<version>.partial` (exact versions, no install scripts: what is run needs none);
4. the binary is run for its version;
5. the folder is renamed to `<version>`: a reader sees a whole install or none.

The CLIs are not ours to hand on: they come from the registry that npm is configured with, onto this machine only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tether_agents.locate import (
    FoundAgent,
    Pin,
    Problem,
    ask_version,
    cache_root,
    installed_arguments,
    installed_binary,
    pin_of,
    platform_key,
)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3

# The packages weigh up to 500 MB; a slow line still gets them in this time.
NPM_TIMEOUT_S: Final = 900.0
_NETWORK_CODES: Final = frozenset(
    {
        *("ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH", "EHOSTUNREACH"),
        *("ERR_SOCKET_TIMEOUT", "ENETWORK", "EPIPE", "E429", "E500", "E502", "E503", "E504"),
        *("UNABLE_TO_GET_ISSUER_CERT_LOCALLY", "SELF_SIGNED_CERT_IN_CHAIN"),
    }
)


@dataclass(frozen=True, slots=True)
class InstallFailure:
    """One line that says what went wrong and what to do; `exit_code` 3 where npm cannot be reached."""

    message: str
    exit_code: int


def install_agent(
    name: str, root: Path | None = None, *, npm: str = "npm", timeout_s: float = NPM_TIMEOUT_S
) -> FoundAgent | InstallFailure:
    """Install the pinned CLI below `root` (default: the cache). Safe to repeat and to run twice at once."""
    pin = pin_of(name)
    if isinstance(pin, Problem):
        return InstallFailure(str(pin), EXIT_USAGE)
    if platform_key() not in pin.binaries:
        detail = f"{pin.package} {pin.version} has no binary for {platform_key()}"
        return InstallFailure(f"{detail}; use one of: {', '.join(pin.binaries)}", EXIT_FAILED)
    folder = (root or cache_root()) / pin.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            return _install_locked(pin, folder, npm, timeout_s)
    except OSError as error:
        detail = f"cannot write {error.filename or folder}: {error.strerror}"
        return InstallFailure(f"{detail}; set XDG_CACHE_HOME to a folder with 1 GB of room", EXIT_FAILED)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _install_locked(pin: Pin, folder: Path, npm: str, timeout_s: float) -> FoundAgent | InstallFailure:
    target = folder / pin.version
    found = _checked(pin, target)
    if isinstance(found, FoundAgent):
        return found
    for leftover in folder.glob("*.partial"):
        shutil.rmtree(leftover)
    partial = folder / f"{pin.version}.partial"
    partial.mkdir()
    try:
        failure = _npm_install(pin, partial, npm, timeout_s)
        if failure is not None:
            return failure
        found = _checked(pin, partial)
        if isinstance(found, Problem):
            return InstallFailure(str(found), EXIT_FAILED)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    binary = installed_binary(pin, target)
    assert binary is not None  # the platform was checked before anything was written
    return FoundAgent(pin.name, binary, found.version, "cache", pin.version, installed_arguments(pin, target))


def _checked(pin: Pin, folder: Path) -> FoundAgent | Problem:
    """The install in `folder` if it is whole and of the pinned version."""
    binary = installed_binary(pin, folder)
    if binary is None or not binary.is_file():
        detail = f"npm installed {pin.package} without its binary for {platform_key()}"
        return Problem(pin.name, "broken", detail, "check that npm does not omit optional dependencies")
    arguments = installed_arguments(pin, folder)
    version = ask_version(pin, binary, arguments)
    if isinstance(version, Problem):
        return version
    if version != pin.version:
        detail = f"{binary} says {version}, {pin.version} is pinned"
        return Problem(pin.name, "wrong_version", detail, "remove that folder and install again")
    return FoundAgent(pin.name, binary, version, "cache", pin.version, arguments)


def _npm_install(pin: Pin, prefix: Path, npm: str, timeout_s: float) -> InstallFailure | None:
    executable = shutil.which(npm)
    if executable is None:
        message = f"npm was not found; install Node {pin.node_min} or newer (it brings npm) and run this again"
        return InstallFailure(message, EXIT_UNREACHABLE)
    command = [executable, "install", "--prefix", str(prefix), "--ignore-scripts", "--include=optional"]
    command += ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--fetch-retries=1"]
    command += [f"{pin.package}@{pin.version}", *pin.extras.get(platform_key(), ())]
    (prefix / "package.json").write_text('{"name": "tether-agent", "private": true}\n', encoding="utf-8")
    try:
        done = subprocess.run(
            command,
            cwd=prefix,
            env=dict(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"npm had not installed {pin.package} after {timeout_s:g} s; check the network and run this again"
        return InstallFailure(message, EXIT_UNREACHABLE)
    if done.returncode == 0:
        return None
    return _explain(pin, done.stderr.decode("utf-8", "replace"))


def _explain(pin: Pin, stderr: str) -> InstallFailure:
    """One line out of npm's many; the error code decides whether the registry was out of reach."""
    codes = re.findall(r"^npm (?:error|ERR!) (?:code|errno) (\S+)", stderr, re.MULTILINE)
    network = [code for code in codes if code in _NETWORK_CODES]
    if network:
        message = f"npm cannot reach its registry for {pin.package} ({network[0]})"
        if "CERT" in network[0]:
            remedy = "name the certificate of your proxy or registry in NODE_EXTRA_CA_CERTS"
            return InstallFailure(f"{message}; {remedy}", EXIT_UNREACHABLE)
        return InstallFailure(f"{message}; check the network and `npm config get registry`", EXIT_UNREACHABLE)
    if "E404" in codes or "ETARGET" in codes:
        message = f"the registry of npm does not have {pin.package}@{pin.version}"
        return InstallFailure(f"{message}; check `npm config get registry`", EXIT_FAILED)
    lines = [line for line in stderr.splitlines() if line.strip()]
    first = lines[0].strip()[:200] if lines else "no message"
    return InstallFailure(f"npm failed for {pin.package}@{pin.version}: {first}; see npm's log", EXIT_FAILED)

"""Find an agent CLI and say which version it is.

Searched in this order, the first one with the pinned version wins:

1. the folder given with `--agents-dir` (a copy of the cache, an npm prefix, or a folder with the binary in it);
2. the cache that `install` fills: `${XDG_CACHE_HOME:-~/.cache}/tether/agents/<name>/<version>` (a colon in the name is
   a dash there);
3. PATH.

A CLI of another version is not taken unless the caller says so: what a CLI prints differs between releases in
ways that matter. Asking a binary for its version runs it, with an environment that holds nothing of ours.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

PINS_FILE: Final = Path(__file__).with_name("pins.toml")
# A cold 300 MB binary on a loaded machine takes seconds to print its version.
VERSION_TIMEOUT_S: Final = 30.0

Source = Literal["agents-dir", "cache", "PATH"]
ProblemCode = Literal["unknown_agent", "unsupported_platform", "not_found", "wrong_version", "broken"]


@dataclass(frozen=True, slots=True)
class Pin:
    """One agent CLI as pinned in pins.toml."""

    name: str
    package: str
    version: str
    command: str
    version_pattern: str
    node_min: int
    binaries: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_default: bool = False

    @property
    def folder(self) -> str:
        """The agent's name as that of a folder."""
        return self.name.replace(":", "-")


@dataclass(frozen=True, slots=True)
class FoundAgent:
    """A CLI that ran and told its version."""

    name: str
    path: Path
    version: str
    source: Source
    pinned_version: str
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """What runs it: the binary, and for a script the script after it."""
        return (str(self.path), *self.arguments)

    @property
    def is_pinned(self) -> bool:
        return self.version == self.pinned_version


@dataclass(frozen=True, slots=True)
class Problem:
    """Why there is no usable CLI, and what to do about it; one line each."""

    name: str
    code: ProblemCode
    detail: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.detail}; {self.remedy}"


def load_pins(path: Path = PINS_FILE) -> dict[str, Pin]:
    """Read pins.toml. It is part of the package: a malformed one is a programming error and raises."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: Pin(
            name=name,
            package=str(table["package"]),
            version=str(table["version"]),
            command=str(table["command"]),
            version_pattern=str(table["version_pattern"]),
            node_min=int(table["node_min"]),
            binaries={str(key): str(value) for key, value in table["binaries"].items()},
            arguments=tuple(map(str, table.get("arguments", ()))),
            extras={str(key): tuple(map(str, value)) for key, value in table.get("extras", {}).items()},
            by_default=bool(table.get("by_default", False)),
        )
        for name, table in tables.items()
    }


def pin_of(name: str) -> Pin | Problem:
    pins = load_pins()
    if name in pins:
        return pins[name]
    return Problem(name, "unknown_agent", f"no agent is called {name!r}", f"known agents: {', '.join(sorted(pins))}")


def platform_key() -> str:
    """The platform in npm's words: `linux-x64`, `linux-arm64-musl`, …"""
    machine = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(platform.machine().lower())
    system = platform.system().lower()
    is_musl = system == "linux" and platform.libc_ver()[0] != "glibc"
    return f"{system}-{machine or platform.machine().lower()}" + ("-musl" if is_musl else "")


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """The folder that holds `<name>/<version>` installs."""
    env = os.environ if environment is None else environment
    base = env.get("XDG_CACHE_HOME") or ""
    # The XDG rules: a relative path is to be ignored.
    root = Path(base) if base.startswith("/") else Path(env.get("HOME") or str(Path.home())) / ".cache"
    return root / "tether" / "agents"


def installed_binary(pin: Pin, folder: Path) -> Path | None:
    """The binary in an npm prefix of this pin, or None on a platform that has none."""
    relative = pin.binaries.get(platform_key())
    return None if relative is None else folder / relative


def installed_arguments(pin: Pin, folder: Path) -> tuple[str, ...]:
    """What that binary is given to run."""
    return tuple(str(folder / relative) for relative in pin.arguments)


def ask_version(pin: Pin, binary: Path, arguments: Sequence[str] = ()) -> str | Problem:
    """Run `<binary> <arguments> --version`."""
    remedy = f"install it anew: python -m tether_agents install {pin.name}"
    environment = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "TMPDIR")} | {
        "DISABLE_AUTOUPDATER": "1"
    }
    try:
        answer = subprocess.run(
            [str(binary), *arguments, "--version"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Problem(pin.name, "broken", f"{binary} --version gave no answer in {VERSION_TIMEOUT_S:g} s", remedy)
    except OSError as error:
        return Problem(pin.name, "broken", f"{binary} cannot be started: {error.strerror}", remedy)
    output = answer.stdout.decode("utf-8", "replace").strip()
    match = re.search(pin.version_pattern, output)
    if answer.returncode != 0 or match is None:
        first_line = output.splitlines()[0][:80] if output else ""
        detail = f"{binary} --version ended with {answer.returncode} and said {first_line!r}"
        return Problem(pin.name, "broken", detail, remedy)
    return match.group(1)


def find_agent(
    name: str,
    agents_dir: Path | None = None,
    *,
    allow_other_version: bool = False,
    environment: Mapping[str, str] | None = None,
) -> FoundAgent | Problem:
    """The first CLI of the pinned version; with `allow_other_version`, else the first that runs at all."""
    pin = pin_of(name)
    if isinstance(pin, Problem):
        return pin
    remedy = f"run: python -m tether_agents install {name}"
    others: list[FoundAgent] = []
    broken: list[Problem] = []
    for source, binary, arguments in _candidates(pin, agents_dir, environment):
        version = ask_version(pin, binary, arguments)
        if isinstance(version, Problem):
            broken.append(version)
            continue
        found = FoundAgent(name, binary, version, source, pin.version, arguments)
        if found.is_pinned:
            return found
        others.append(found)
    if others and allow_other_version:
        return others[0]
    if others:
        seen = ", ".join(f"{other.version} at {other.path}" for other in others)
        return Problem(name, "wrong_version", f"{name} {pin.version} is needed, found {seen}", remedy)
    if broken:
        return broken[0]
    searched = f"{agents_dir}, " if agents_dir is not None else ""
    detail = f"{name} {pin.version} was not found in {searched}{cache_root(environment)} or on PATH"
    return Problem(name, "not_found", detail, remedy)


def _candidates(
    pin: Pin, agents_dir: Path | None, environment: Mapping[str, str] | None
) -> Iterator[tuple[Source, Path, tuple[str, ...]]]:
    """Existing executables, each real file once, and what each is given to run."""
    env = os.environ if environment is None else environment

    def installed(source: Source, folder: Path) -> tuple[Source, Path | None, tuple[str, ...]]:
        return source, installed_binary(pin, folder), installed_arguments(pin, folder)

    listed: list[tuple[Source, Path | None, tuple[str, ...]]] = []
    if agents_dir is not None:
        listed.append(installed("agents-dir", agents_dir / pin.folder / pin.version))
        listed.append(installed("agents-dir", agents_dir))
        listed.append(("agents-dir", agents_dir / pin.command, ()))
    listed.append(installed("cache", cache_root(environment) / pin.folder / pin.version))
    on_path = shutil.which(pin.command, path=env.get("PATH", ""))
    if on_path is not None and not pin.arguments:
        # What npm puts there may be a script that starts the native binary of a package beside it, and outlives it.
        listed += [("PATH", installed_binary(pin, folder), ()) for folder in Path(on_path).resolve().parents]
    listed.append(("PATH", Path(on_path) if on_path else None, ()))
    seen: set[Path] = set()
    for source, binary, arguments in listed:
        if binary is None or not binary.is_file() or not os.access(binary, os.X_OK):
            continue
        if not all(Path(each).is_file() for each in arguments):
            continue
        real = binary.resolve()
        if real not in seen:
            seen.add(real)
            yield source, binary, arguments

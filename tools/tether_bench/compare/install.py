"""The contenders' packages: pinned, in a cache outside the clone, fetched only by `install`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_INSTALL_S: Final = 300.0


class InstallError(Exception):
    """What went wrong and what to do, in one line."""


@dataclass(frozen=True, slots=True)
class Pin:
    """`packages` as npm or pip take them; `file` is relative to the install's folder."""

    name: str
    registry: str
    packages: tuple[str, ...]
    version: str
    file: str

    @property
    def folder(self) -> Path:
        return cache_root() / self.name / self.version

    @property
    def path(self) -> Path:
        return self.folder / self.file

    @property
    def installed(self) -> bool:
        return self.path.is_file()


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tether" / "compare"


def pins() -> dict[str, Pin]:
    with (Path(__file__).parent / "pins.toml").open("rb") as file:
        found = tomllib.load(file)
    return {
        name: Pin(name, one["registry"], tuple(one["packages"]), one["version"], one["file"])
        for name, one in found.items()
    }


def install(pin: Pin) -> bool:
    """Into a `.partial` folder that is renamed when it is whole. False where it was there. Raises InstallError."""
    if pin.installed:
        return False
    partial = pin.folder.with_name(f"{pin.version}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _fetch(pin, partial)
        if not (partial / pin.file).is_file():
            raise InstallError(f"{pin.name}: {', '.join(pin.packages)} has no {pin.file} for this platform")
        (partial / pin.file).chmod(0o755)
        shutil.rmtree(pin.folder, ignore_errors=True)
        partial.rename(pin.folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _fetch(pin: Pin, folder: Path) -> None:
    if pin.registry == "npm":
        (folder / "package.json").write_text('{"name": "tether-compare", "private": true}\n', encoding="utf-8")
        command = ["npm", "install", "--prefix", str(folder), "--include=optional", "--ignore-scripts"]
        command += ["--no-audit", "--no-fund", "--loglevel=error", *pin.packages]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--python", sys.executable]
        command += ["--target", str(folder), *pin.packages]
    else:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--target", str(folder), *pin.packages]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except FileNotFoundError:
        raise InstallError(f"{pin.name}: {command[0]} was not found; install Node 20 or newer") from None
    except subprocess.TimeoutExpired:
        raise InstallError(f"{pin.name}: not installed after {_INSTALL_S:g} s; check the network") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InstallError(f"{pin.name}: {lines[0][:200] if lines else 'the installer failed'}")

"""The locked requirements: which files there are, and which packages at which versions they pin."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
WHOLE: Final = ROOT / "requirements.lock"
SERVICES: Final = ROOT / "deploy" / "requirements"
_PIN: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)")


class LockError(Exception):
    """A file of requirements is not as it is made by `make lock`; the message names it."""


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    version: str
    hashes: tuple[str, ...]


def files() -> dict[str, Path]:
    """What a bill is made of, by its name: each service, and `all` for the environment of the repository."""
    return {"all": WHOLE, **{path.stem: path for path in sorted(SERVICES.glob("*.txt"))}}


def normalized(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> list[Pin]:
    """Raises LockError where something is not pinned, or has no hash."""
    found: list[tuple[str, str, list[str]]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        hashes = re.findall(r"--hash=(sha256:[0-9a-f]{64})", line)
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if not line.startswith(" "):
            pin = _PIN.match(stripped)
            if pin is None:
                raise LockError(f"{path.name}, line {number}: must pin a version with ==; make it with `make lock`")
            found.append((normalized(pin[1]), pin[2], hashes))
        elif found:
            found[-1][2].extend(hashes)
    bare = next((name for name, _, hashes in found if not hashes), None)
    if bare is not None or not found:
        raise LockError(f"{path.name}: {bare or 'it'} has no hash; make it with `make lock`")
    return [Pin(name, version, tuple(hashes)) for name, version, hashes in found]

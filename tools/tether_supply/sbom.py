"""Bills of materials: CycloneDX JSON out of the locked requirements, the same bytes for the same lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tether_supply.lock import ROOT, LockError, files, pins

FOLDER: Final = ROOT / "build" / "sbom"
SPECIFICATION: Final = "1.6"
_SCHEMA: Final = SchemaVersion.V1_6
BUILD_S: Final = 120.0


class SbomError(Exception):
    """A bill cannot be made, or would not be valid."""


def write(folder: Path = FOLDER) -> dict[str, Path]:
    """One bill for each service, and for everything; by name. Raises SbomError."""
    folder.mkdir(parents=True, exist_ok=True)
    return {name: _write(name, path, folder / f"{name}.cdx.json") for name, path in files().items()}


def _write(name: str, requirements: Path, to: Path) -> Path:
    try:
        pins(requirements)
    except LockError as error:
        raise SbomError(str(error)) from None
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--output-reproducible", "--no-validate"]
    command += ["--spec-version", SPECIFICATION, "--output-format", "JSON", "--output-file", str(to)]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode != 0:
        raise SbomError(f"{name}: cyclonedx-py: {done.stderr.strip()[-500:]}")
    validate(to)
    return to


def validate(path: Path) -> None:
    """Against the schema, which comes with the library. Raises SbomError."""
    error = JsonStrictValidator(_SCHEMA).validate_str(path.read_text(encoding="utf-8"))
    if error is not None:
        raise SbomError(f"{path.name} is no valid CycloneDX {SPECIFICATION}: {str(error)[:500]}")

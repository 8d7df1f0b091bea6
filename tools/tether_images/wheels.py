"""build/wheels: what the images of these services are made of.

fetch   by `pip download --require-hashes`, for the Python of the base image
pack    out of the environment that this runs in, which was installed by hash: needs no network, and the base image
        must have the same Python
"""

from __future__ import annotations

import fcntl
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Final

from tether_images.engine import ImageError, tail

ROOT: Final = Path(__file__).resolve().parents[2]
WHEELS: Final = ROOT / "build" / "wheels"
REQUIREMENTS: Final = ROOT / "deploy" / "requirements"
_FETCH_S: Final = 300.0


def requirements_of(service: str) -> Path:
    """Raises ImageError for a service that has none."""
    path = REQUIREMENTS / f"{service}.txt"
    if not path.exists():
        raise ImageError(
            f"no service {service}; one of {' '.join(sorted(one.stem for one in REQUIREMENTS.glob('*.txt')))}"
        )
    return path


@contextmanager
def held() -> Iterator[None]:
    """One build at a time: they share the folder of wheels."""
    WHEELS.parent.mkdir(exist_ok=True)
    with (WHEELS.parent / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def empty() -> None:
    """Wheels of another Python or of other versions must not get in."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)


def fetch(services: Iterable[str], python: str) -> None:
    """Download. Raises ImageError where an index cannot be reached or a hash is another."""
    machine = platform.machine()
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in (36, 34, 31, 28, 24, 17)]
    for service in services:
        done = subprocess.run(
            [*_pip(), "download", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps",
             "--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms,
             f"--platform=manylinux2014_{machine}", "--dest", str(WHEELS), "-r", str(requirements_of(service))],
            capture_output=True, text=True, timeout=_FETCH_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise ImageError(f"pip download for {service}: {tail(done.stderr, 3)}")


def _pip() -> list[str]:
    """A pip of this or of another Python: a venv that uv made has none, and which one downloads does not matter."""
    for python in (sys.executable, str(Path(sys.base_prefix) / "bin" / "python3"), shutil.which("python3")):
        if python is not None:
            command = [python, "-m", "pip"]
            if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
                return command
    raise ImageError("no Python here has pip; install python3-pip, or use --offline")


def pack(pins: Iterable[tuple[str, str, bool]]) -> None:
    """One wheel for each pin that is installed here. Raises ImageError for one that is needed and is not."""
    for name, version, optional in sorted(set(pins)):
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if optional:
                continue
            raise ImageError(f"{name} is not installed in this environment; run `make venv`") from None
        if found.version != version:
            raise ImageError(f"{name} is {found.version} here, the requirements say {version}; run `make venv`")
        _pack(found, name, version)


def _pack(found: metadata.Distribution, name: str, version: str) -> None:
    tag = next(
        (
            line.partition(":")[2].strip()
            for line in (found.read_text("WHEEL") or "").splitlines()
            if line[:4] == "Tag:"
        ),
        "py3-none-any",
    )
    path = WHEELS / f"{name.replace('-', '_')}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in found.files or ():
            source = Path(str(file.locate()))
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                archive.write(source, str(file))

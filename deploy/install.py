"""Install a service's requirements into a folder while an image is built: `install.py SERVICE FOLDER`.

Beside this file lie SERVICE.txt and, where an image is built offline, the wheels; those were checked against the
hashes when they were fetched. Without wheels pip fetches what the file names, by hash. What Tether itself is called and
which version it is stands beside them, from pyproject.toml: services tell it. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Final

_PIN: Final = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)\s*(;?)")


def pins(requirements: Path) -> dict[tuple[str, str], bool]:
    """Name and version of each requirement; True where a marker says that it may not be needed here."""
    found = {}
    for line in requirements.read_text(encoding="utf-8").splitlines():
        match = _PIN.match(line)
        if match is not None:
            found[normal(match[1]), match[2]] = bool(match[3])
    return found


def normal(name: str) -> str:
    """A distribution's name as it is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def unpack(wanted: dict[tuple[str, str], bool], wheels: list[Path], target: Path) -> list[str]:
    """Unzip the wheels that are wanted; names of those that are missing."""
    by_pin = {}
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        by_pin[normal(name), version] = wheel
    missing = []
    for pin, optional in wanted.items():
        found = by_pin.get(pin)
        if found is not None:
            with zipfile.ZipFile(found) as archive:
                archive.extractall(target)
        elif not optional:
            missing.append("==".join(pin))
    return missing


def name_itself(project: Path, target: Path) -> None:
    """The metadata of an installed distribution: its sources lie elsewhere in the image."""
    facts = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    folder = target / f"{facts['name']}-{facts['version']}.dist-info"
    folder.mkdir()
    told = f"Metadata-Version: 2.1\nName: {facts['name']}\nVersion: {facts['version']}\n"
    (folder / "METADATA").write_text(told, encoding="utf-8")


def main(service: str, target: Path) -> int:
    here = Path(__file__).parent
    requirements = here / f"{service}.txt"
    if not requirements.exists():
        print(f"SERVICE={service}: must be one of {' '.join(sorted(path.stem for path in here.glob('*.txt')))}")
        return 1
    target.mkdir(parents=True)
    name_itself(here / "pyproject.toml", target)
    wheels = sorted(here.glob("*.whl"))
    if wheels:
        missing = unpack(pins(requirements), wheels, target)
        if missing:
            print(f"wheels are missing in build/wheels: {' '.join(missing)}")
        return 1 if missing else 0
    options = ["--require-hashes", "--only-binary", ":all:", "--no-deps", "--no-compile", "--no-cache-dir"]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--root-user-action",
        "ignore",
    ]
    return subprocess.run([*pip, *options, "--target", str(target), "-r", str(requirements)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))

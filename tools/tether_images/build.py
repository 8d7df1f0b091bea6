"""The images: services, and the sandbox that agents run in."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tether_images import base, provenance, wheels
from tether_images.engine import ImageError, docker, python_of, size_bytes
from tether_images.wheels import ROOT

SERVICES: Final = ("backend", "router", "agent", "operator", "collector")
DEFAULT_BASE: Final = "python:3.13-slim"
_SANDBOX: Final = "collector"
KEPT: Final = 2


@dataclass(frozen=True, slots=True)
class Image:
    """What was built. `size_bytes`: unpacked, with its base."""

    name: str
    size_bytes: int


def image_of(service: str, tag: str, prefix: str = "tether") -> str:
    return f"{prefix}-{'sandbox' if service == _SANDBOX else service}:{tag}"


def build(
    services: Sequence[str], *, base_image: str | None, tag: str, offline: bool, prefix: str = "tether"
) -> list[Image]:
    """Build them. Without `base_image` one is made out of this machine's Python. Raises ImageError."""
    with wheels.held():
        chosen = base.local_base() if base_image is None else base_image
        prepare(services, python_of(chosen), offline=offline)
        images = []
        for service in services:
            started, name = datetime.now(UTC), image_of(service, tag, prefix)
            images.append(_build(service, chosen, name))
            provenance.write(name, service, chosen, {"base": chosen, "offline": offline}, started)
        return images


def prepare(services: Sequence[str], python: str, *, offline: bool) -> None:
    """Fill build/wheels, which is held. Raises ImageError."""
    wheels.empty()
    if not offline:
        wheels.fetch(services, python)
        return
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python != own:
        raise ImageError(f"the base image has Python {python}, this environment {own}: offline they must be the same")
    installer = _installer()
    pins = []
    for service in services:
        found = installer.pins(wheels.requirements_of(service))
        pins += [(name, version, optional) for (name, version), optional in found.items()]
    wheels.pack(pins)


def _build(service: str, base_image: str, name: str) -> Image:
    target = "sandbox" if service == _SANDBOX else "service"
    arguments = ("--build-arg", f"BASE_IMAGE={base_image}", "--build-arg", f"SERVICE={service}")
    docker("build", "-f", "deploy/Dockerfile", "--target", target, *arguments, "-t", name, ".", cwd=ROOT)
    size = size_bytes(name)
    assert size is not None, "the image was just built"
    return Image(name, size)


def sandbox_image(prefix: str = "tether-test") -> str:
    """A sandbox image of this very source, built offline once: its tag is the digest of what goes in. For tests."""
    with wheels.held():
        base_image = base.local_base()
        digest = hashlib.sha256(base_image.encode())
        for path in sorted(_sources()):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
        name = image_of(_SANDBOX, digest.hexdigest()[:16], prefix)
        if size_bytes(name) is None:
            prepare([_SANDBOX], python_of(base_image), offline=True)
            _build(_SANDBOX, base_image, name)
            _forget_older(name)
    return name


def _forget_older(name: str) -> None:
    """Of earlier states of the source a few stay; one that a container uses is never removed."""
    known = docker("images", "--format", "{{.Repository}}:{{.Tag}}", name.partition(":")[0]).split()  # newest first
    for old in [one for one in known if one != name][KEPT:]:
        with contextlib.suppress(ImageError):
            docker("rmi", old)


def _sources() -> Iterator[Path]:
    yield ROOT / "pyproject.toml"
    yield from (ROOT / "deploy" / name for name in ("Dockerfile", "install.py", "requirements/collector.txt"))
    yield from _files(ROOT / "contracts" / "tether")
    yield from _files(ROOT / "services" / "tether_collector")


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _installer() -> Any:
    """deploy/install.py, which stands alone: it runs in an image that holds nothing else."""
    spec = importlib.util.spec_from_file_location("tether_images_install", ROOT / "deploy" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

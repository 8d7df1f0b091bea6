"""Where an image came from: an in-toto statement with SLSA's provenance predicate, one file for each image.

The subject is the image by its id. The materials are what its build read, each by digest: the commit, the locked
requirements, the Dockerfile, the base image, the wheels. A tree with changes that are not committed is said to be one:
its commit names only what it began from. The statement says nothing by itself; who builds releases signs it
(docs/how-to/release.md).
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tether_images import wheels
from tether_images.engine import ImageError, docker
from tether_images.wheels import ROOT

FOLDER: Final = ROOT / "build" / "provenance"
STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "urn:tether:image:v1"
BUILDER: Final = "urn:tether:make-images"
GIT_S: Final = 30.0


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def image_id(image: str) -> str:
    """sha-256 in hex. Raises ImageError."""
    return docker("image", "inspect", "--format", "{{.Id}}", image).strip().removeprefix("sha256:")


def source() -> dict[str, Any]:
    """The commit, and whether the tree was just that; neither is known outside of a repository."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return {"uri": "urn:tether:source", "annotations": {"commit": "unknown"}}
    changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    uri = "git+" + (_git("config", "--get", "remote.origin.url") or "urn:tether:source")
    return {"uri": uri, "digest": {"gitCommit": commit}, "annotations": {"uncommitted_changes": changed}}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def materials(service: str, base_image: str, base_id: str) -> list[dict[str, Any]]:
    """What the build of a service's image reads, by digest."""
    read = [ROOT / "deploy" / "Dockerfile", ROOT / "deploy" / "install.py", wheels.requirements_of(service)]
    packed = sorted((ROOT / "build" / "wheels").glob("*.whl"))
    return [
        source(),
        {"uri": f"docker:{base_image}", "digest": {"sha256": base_id}},
        *(
            {"uri": f"file:{path.relative_to(ROOT)}", "digest": {"sha256": sha256_of(path)}}
            for path in [*read, *packed]
        ),
    ]


def statement(
    image: str,
    digest: str,
    service: str,
    parameters: Mapping[str, Any],
    resolved: list[dict[str, Any]],
    times: tuple[datetime, datetime],
) -> dict[str, Any]:
    """The statement of one image. Pure."""
    started, finished = (time.astimezone(UTC).isoformat(timespec="seconds") for time in times)
    return {
        "_type": STATEMENT,
        "subject": [{"name": image, "digest": {"sha256": digest}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"service": service, **parameters},
                "internalParameters": {"machine": platform.machine()},
                "resolvedDependencies": resolved,
            },
            "runDetails": {
                "builder": {"id": BUILDER},
                "metadata": {"invocationId": digest, "startedOn": started, "finishedOn": finished},
            },
        },
    }


def write(
    image: str, service: str, base_image: str, parameters: Mapping[str, Any], started: datetime, folder: Path = FOLDER
) -> Path:
    """Beside the image that was just built. Raises ImageError."""
    resolved = materials(service, base_image, image_id(base_image))
    made = statement(image, image_id(image), service, parameters, resolved, (started, datetime.now(UTC)))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{service}.intoto.json"
    try:
        path.write_text(json.dumps(made, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise ImageError(f"{path} cannot be written: {error.strerror}") from None
    return path

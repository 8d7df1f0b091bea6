"""What docs/ has from the code: JSON Schemas, OpenAPI, AsyncAPI and the reference pages. CI fails when they drift.

schemas/*.json       one per message, record and event body     (models)
openapi.json         as the backend serves it                    (tether_backend.http.openapi)
asyncapi.json        subjects, buckets, who sends what           (asyncapi)
reference/*.md       settings, commands, errors                  (reference)
                     permissions on NATS                        (nats_permissions)
"""

from __future__ import annotations

from pathlib import Path

from tether_backend.http.app import build
from tether_schemas import asyncapi, models, nats_permissions, reference


def render() -> dict[str, str]:
    """File below docs/ → content."""
    files = {f"schemas/{name}": content for name, content in models.render().items()}
    return {
        **files,
        "openapi.json": models.pretty(build(None).openapi()),
        "asyncapi.json": models.pretty(asyncapi.document()),
        "reference/settings.md": reference.settings(),
        "reference/cli.md": reference.commands(),
        "reference/errors.md": reference.errors(),
        "reference/nats-permissions.md": nats_permissions.page(),
    }


def _left_over(folder: Path, wanted: dict[str, str]) -> list[str]:
    """Schemas that no model of the code makes any more."""
    present = (f"schemas/{path.name}" for path in (folder / "schemas").glob("*.json"))
    return sorted(name for name in present if name not in wanted)


def drift(folder: Path) -> list[str]:
    """What differs between the folder and the code, one sentence each."""
    wanted = render()
    found = [f"{name}: not of this code" for name in _left_over(folder, wanted)]
    for name, content in wanted.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name}: missing")
        elif path.read_text(encoding="utf-8") != content:
            found.append(f"{name}: differs from the code")
    return sorted(found)


def write(folder: Path) -> int:
    """Write every file, remove schemas that are not of this code; returns how many there are."""
    wanted = render()
    for name in _left_over(folder, wanted):
        (folder / name).unlink()
    for name, content in wanted.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return len(wanted)

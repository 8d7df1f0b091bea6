"""Positions and places that come from outside: cursors, page tokens; manifests of checkpoints and their paths.

Laws: what decodes encodes to what decodes equally, and for another conversation to nothing; what a manifest
that is let through names lies below the workspace, and through no link.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Final

from tether.checkpoint import CheckpointManifest, CheckpointReference, decode_manifest, digest_of
from tether.cursor import Cursor, Standing, judge
from tether.errors import InvalidError
from tether.ports import StoredMessage
from tether_backend.http.parse import decode_page, encode_page
from tether_collector.core.restore_rules import check_manifest, targets
from tether_fuzz.target import Features, Target, law, refusal
from tether_fuzz.targets import good


def run_cursor(data: bytes) -> Features:
    text = data.decode("utf-8", "surrogateescape")
    try:
        cursor = Cursor.decode(text, good.TENANT, good.CONVERSATION)
    except InvalidError as error:
        return refusal(error)
    again = cursor.encode(good.TENANT, good.CONVERSATION)
    law(Cursor.decode(again, good.TENANT, good.CONVERSATION) == cursor, "a cursor decodes to itself")
    for tenant, conversation in (("acme2", good.CONVERSATION), (good.TENANT, "c2"), ("acm", "ec1")):
        try:
            Cursor.decode(text, tenant, conversation)
        except InvalidError:
            continue
        law(False, "a cursor is of one conversation")
    message = StoredMessage(good.SUBJECT, cursor.sequence, 5, b"")
    told = judge(cursor, message, last_sequence=10)
    law(told is not Standing.CURRENT or cursor.sequence <= 10, "a cursor beyond the end is not current")
    return ["accepted", told]


def run_page(data: bytes) -> Features:
    try:
        position = decode_page(data.decode("utf-8", "surrogateescape"))
    except InvalidError as error:
        return refusal(error)
    law(decode_page(encode_page(position)) == position, "a page decodes to itself")
    return ["accepted"]


def run_manifest(data: bytes) -> Features:
    reference = CheckpointReference.model_validate(
        {**_NAMES, "manifest": digest_of(data), "manifest_bytes": len(data), **_REFERENCE}
    )
    try:
        manifest = decode_manifest(data, reference)
    except InvalidError as error:
        return refusal(error)
    law(CheckpointManifest.model_validate_json(manifest.encode()) == manifest, "a manifest decodes to itself")
    why = check_manifest(manifest)
    if why is not None:
        return [("unsafe", why.rpartition("' ")[2][:12])]
    links = {file.path for file in manifest.files if file.link is not None}
    for path in (*(file.path for file in manifest.files), *manifest.empty_folders):
        law(posixpath.normpath(path) == path and not path.startswith(("/", "..")), "a path is below the workspace")
        law(not any(str(above) in links for above in PurePosixPath(path).parents), "a path leads through no link")
        os.fsencode(path)
    for target in targets(manifest):
        law(len(target.split("/")) <= 2, "what is placed is directly below the workspace or its state")
    return ["safe", bool(links)]


_NAMES: Final[dict[str, Any]] = {
    "v": 1,
    "checkpoint": "cp1",
    "drain": "d1",
    "tenant": good.TENANT,
    "workspace": good.WORKSPACE,
    "sandbox": "sbx_1",
    "boot": "boot1",
}
_REFERENCE: Final[dict[str, Any]] = {"stored": "both", "include": "workspace", "clean": True}


def _manifest_seeds() -> Iterable[bytes]:
    file = {"bytes": 3, "digest": good.DIGEST, "mode": 0o600}
    manifest = {
        **_NAMES,
        "created_at": 1,
        "reason": "r",
        "include": "workspace",
        "clean": False,
        "executions": [{"target": good.TARGET_JSON, "outcome": "forced", "interrupted": ["Bash"], "cut": True}],
        "files": [
            {**file, "path": ".tether/journal.sqlite3", "kind": "state"},
            {**file, "path": ".tether/agents/claude/projects/p/s.jsonl", "kind": "session"},
            {**file, "path": "src/main.py", "kind": "workspace", "mode": 0o755},
            {**file, "path": "src/link", "kind": "workspace", "link": "../elsewhere", "bytes": 0},
        ],
        "empty_folders": ["src/empty"],
        "left_out": [{"path": ".tether/agents/claude/.credentials.json", "why": "credentials"}],
    }
    yield json.dumps(manifest).encode()


def _cursor_seeds() -> Iterable[bytes]:
    for cursor in (Cursor.beginning(), Cursor.after(5, 5), Cursor.after(7, 123_456, index=3), Cursor(2**64 - 1, 0, 1)):
        yield cursor.encode(good.TENANT, good.CONVERSATION).encode()


def _page_seeds() -> Iterable[bytes]:
    for position in ((0, "a"), (2**61, "c" * 64)):
        yield str(encode_page(position)).encode()


TARGETS: Final = (
    Target("cursor", "contract", "text", run_cursor, _cursor_seeds, bytes_max=4096),
    Target("page", "contract", "text", run_page, _page_seeds, 4096, ("tether_backend.http.parse",)),
    Target(
        "manifest", "contract", "json", run_manifest, _manifest_seeds, 32 * 1024, ("tether.", "tether_collector.core.")
    ),
)

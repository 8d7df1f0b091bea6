"""`GET /v1/conversations/{c}/export`: the whole conversation as one document (`tether.export_format`), in pieces.

One item is in memory at a time, with the blob that it refers to. Whatever goes wrong once the document has begun breaks
the connection off: a document that is not whole must not look as if it were.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from tether.blobs import read_blob
from tether.deletion import check_not_deleted
from tether.errors import Code, ProblemError, problem
from tether.events import BlobRef
from tether.export_format import (
    MEDIA,
    ConversationExport,
    ExportedItem,
    ExportedMessage,
    ExportedResponse,
)
from tether.limits import LINE_BYTES_MAX
from tether_backend.core import markdown
from tether_backend.http.course import proven
from tether_backend.http.parse import ConversationId, Who, With
from tether_backend.runtime import Deps
from tether_backend.store.conversation_export import Exported, entries_of, items_of, workspace_of

router = APIRouter()
BLOB_BYTES_MAX: Final = 2 * LINE_BYTES_MAX  # nothing that an agent writes on one line is larger
_SUFFIX: Final = {"json": "json", "markdown": "md"}


@router.get(
    "/v1/conversations/{conversation}/export",
    response_class=Response,
    responses={200: {"content": {"application/json": {}, "text/markdown": {}}}},
)
async def export_conversation(
    conversation: ConversationId,
    who: Who,
    deps: With,
    kind: Annotated[Literal["json", "markdown"], Query(alias="format")] = "json",
) -> Response:
    await check_not_deleted(deps.bus, who.tenant, conversation)
    proven(deps, who.tenant)
    await deps.caught_up(who.tenant)
    workspace = await workspace_of(deps.database, who.tenant, conversation)
    if workspace is None:
        raise ProblemError(problem(Code.NOT_FOUND, "conversation: there is none of this id"))
    export = ConversationExport(
        conversation=conversation,
        workspace=workspace,
        exported_at=time.time_ns() // 1_000_000,
        version=deps.version,
    )
    pieces = _Pieces(deps, who.tenant, export)
    body = pieces.json() if kind == "json" else pieces.markdown()
    name = f"{conversation}.{_SUFFIX[kind]}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return StreamingResponse(body, media_type=MEDIA[kind], headers=headers)


class _Pieces:
    """One export. Raises SQLAlchemyError, BusError, ProblemError in the middle."""

    def __init__(self, deps: Deps, tenant: str, export: ConversationExport) -> None:
        self._deps = deps
        self._tenant = tenant
        self._export = export

    def _entries(self) -> AsyncIterator[Exported]:
        return entries_of(self._deps.database, self._tenant, self._export.conversation)

    async def _items(self, execution: str) -> AsyncIterator[ExportedItem]:
        async for entry in items_of(self._deps.database, self._tenant, execution):
            blob = getattr(entry.item, "blob", None)
            if blob is None:
                yield entry
                continue
            text = await self._content(blob)
            yield entry.model_copy(update={"content": text, "content_missing": text is None})

    async def _content(self, blob: Any) -> str | None:
        try:
            reference = BlobRef.model_validate(blob)
        except ValidationError:
            return None
        bus, workspace = self._deps.bus, self._export.workspace
        data = await read_blob(bus, self._tenant, workspace, reference, bytes_max=BLOB_BYTES_MAX)
        return None if data is None else data.decode("utf-8", "replace")

    async def json(self) -> AsyncIterator[bytes]:
        head = self._export.model_dump(mode="json", exclude={"entries"})
        yield json.dumps(head, ensure_ascii=False).encode()[:-1] + b',"entries":['
        first = True
        async for entry in self._entries():
            yield b"" if first else b","
            first = False
            run = entry.execution if isinstance(entry, ExportedResponse) else None
            if run is None:
                yield entry.model_dump_json(exclude_none=True).encode()
                continue
            assert isinstance(entry, ExportedResponse)
            # The items are put into the end of both objects, one by one.
            outer = entry.model_copy(update={"execution": None}).model_dump_json(exclude_none=True).encode()
            inner = run.model_dump_json(exclude_none=True, exclude={"items"}).encode()
            yield outer[:-1] + b',"execution":' + inner[:-1] + b',"items":['
            separator = b""
            async for one in self._items(run.execution):
                yield separator + one.model_dump_json(exclude_none=True).encode()
                separator = b","
            yield b"]}}"
        await self._still_there()
        yield b"]}\n"

    async def markdown(self) -> AsyncIterator[bytes]:
        yield markdown.head(self._export).encode()
        async for entry in self._entries():
            match entry:
                case ExportedMessage():
                    yield markdown.message(entry).encode()
                case ExportedResponse(execution=run):
                    yield markdown.response(entry).encode()
                    if run is not None:
                        async for one in self._items(run.execution):
                            yield markdown.item(one).encode()
                        yield markdown.response_end(run).encode()
                case _:
                    yield markdown.note(entry).encode()
        await self._still_there()
        yield b"\n" + markdown.END.encode()

    async def _still_there(self) -> None:
        await check_not_deleted(self._deps.bus, self._tenant, self._export.conversation)

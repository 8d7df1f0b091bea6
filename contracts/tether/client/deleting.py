"""The client's calls that take a conversation along, or away: export, delete, waiting for a deletion's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

from tether.client.backoff import Backoff
from tether.client.transport import Transport
from tether.deletion import DeletionView
from tether.errors import Code, InvalidError, ProblemError, problem
from tether.export_format import FORMATS, ExportFormat
from tether.ids import check_token, new_id

_LOOK_MAX_S: Final = 1.0
DELETED_S: Final = 120.0  # a conversation of ten thousand messages takes about a minute to erase


class DeletionCalls:
    """Part of `tether.Client`."""

    _transport: Transport

    def export(self, conversation: str, kind: ExportFormat = "json") -> AsyncGenerator[bytes, None]:
        """The whole conversation, in pieces: `json` (`tether.export_format`) or `markdown`. Over HTTP only. Raises
        NOT_FOUND, CONVERSATION_DELETED, and RUNTIME_UNAVAILABLE where it breaks off: then it is not whole."""
        if kind not in FORMATS:
            raise InvalidError("kind", f"must be one of {', '.join(FORMATS)}")
        return self._transport.export(check_token(conversation, "conversation"), kind)

    async def delete_conversation(
        self, conversation: str, *, force: bool = False, deletion_id: str | None = None
    ) -> DeletionView:
        """Delete a conversation for good, wherever it is stored; what it had an agent write into the workspace's files
        stays. Answers at once, and joins a deletion that runs. `force`: what runs is stopped first. Raises NOT_FOUND,
        SESSION_BUSY."""
        named = check_token(deletion_id or new_id("del"), "deletion_id")
        return await self._transport.begin_deletion(check_token(conversation, "conversation"), named, force)

    async def deletion(self, conversation: str) -> DeletionView:
        """How the conversation's deletion stands. Raises NOT_FOUND."""
        return await self._transport.deletion(check_token(conversation, "conversation"))

    async def deleted(
        self,
        begun: DeletionView,
        *,
        timeout_s: float = DELETED_S,
        on_progress: Callable[[DeletionView], None] | None = None,
    ) -> DeletionView:
        """The deletion once it is over. `on_progress` is called with each view that differs from the one before. Raises
        RUNTIME_UNAVAILABLE after `timeout_s`: it goes on by itself, and `context.pending_on` says what it waits for."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        backoff = Backoff(quick=5, seldom_s=_LOOK_MAX_S, seldom_max_s=_LOOK_MAX_S)
        last = begun
        while not last.is_final:
            wait_s = backoff.next_s()
            if loop.time() + wait_s > deadline_s:
                detail = f"the deletion goes on (step {last.step}); ask for it again"
                raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail, pending_on=list(last.pending_on)))
            await asyncio.sleep(wait_s)
            view = await self._transport.deletion(last.conversation)
            if on_progress is not None and view != last:
                on_progress(view)
            last = view
        return last

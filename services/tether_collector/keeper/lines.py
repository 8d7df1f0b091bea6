"""Output bytes into lines, without ever holding more than one chunk: pure."""

from __future__ import annotations

from .records import META_CONTINUES, META_NO_EOL, META_NONE


class LineSplitter:
    """Cuts one stream into lines; a line longer than the chunk leaves in chunks that say that their rest follows.

    The bytes are not interpreted: NULs, halves of UTF-8 characters and carriage returns pass as they are.
    """

    __slots__ = ("_chunk_bytes", "_held", "_held_bytes", "mid_line")

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.mid_line = False  # a chunk of the current line has left already

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """(meta, line) for each line or chunk that is complete now."""
        out: list[tuple[bytes, bytes]] = []
        pieces = data.split(b"\n")
        rest = pieces.pop()
        for piece in pieces:
            if self._held or len(piece) > self._chunk_bytes:
                self._hold(piece, out)
                piece = self._take()
            out.append((META_NONE, piece))
            self.mid_line = False
        if rest:
            self._hold(rest, out)
        return out

    def finish(self) -> list[tuple[bytes, bytes]]:
        """The last line where it had no newline; after this the splitter is empty."""
        if not self._held_bytes:
            return []
        self.mid_line = False
        return [(META_NO_EOL, self._take())]

    def _hold(self, piece: bytes, out: list[tuple[bytes, bytes]]) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)
        # Strictly longer: a chunk that promises a rest always has one.
        if self._held_bytes > self._chunk_bytes:
            whole = b"".join(self._held)
            at = 0
            while len(whole) - at > self._chunk_bytes:
                out.append((META_CONTINUES, whole[at : at + self._chunk_bytes]))
                at += self._chunk_bytes
            self._held, self._held_bytes = [whole[at:]], len(whole) - at
            self.mid_line = True

    def _take(self) -> bytes:
        whole = b"".join(self._held)
        self._held, self._held_bytes = [], 0
        return whole

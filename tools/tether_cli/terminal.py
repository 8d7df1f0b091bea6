"""The terminal of a live command: pieces written in order, lines read without blocking the event loop.

stdout gets the agent's words, stderr everything beside them, so that `tether run … > file` holds the words alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
from collections.abc import Iterable
from typing import Final, TextIO

from tether_cli.render import Close, Line, Piece, Text

_LINE_BYTES_MAX: Final = 64 * 1024


class Screen:
    """Knows whether the cursor is in the middle of a line, and of which stream's."""

    def __init__(self, out: TextIO | None = None, beside: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._beside = beside or sys.stderr
        self._middle: TextIO | None = None

    def write(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Text(text):
                    self._text(text)
                case Line(text, is_open):
                    self.end_line()
                    self._put(self._beside, text if is_open else text + "\n")
                    self._middle = self._beside if is_open else None
                case Close(text):
                    self._put(self._beside, text + "\n")
                    self._middle = None

    def _text(self, text: str) -> None:
        if self._middle is self._beside:
            self.end_line()
        if text == "\n" and self._middle is None:
            return
        self._put(self._out, text)
        self._middle = None if text.endswith("\n") else self._out

    def line(self, text: str) -> None:
        self.write([Line(text)])

    def ask(self, text: str) -> None:
        """A question; the answer is typed behind it, and its newline ends the line."""
        self.end_line()
        self._put(self._beside, text)
        self._middle = self._beside

    def answered(self) -> None:
        """The newline that the user typed has ended the question's line."""
        self._middle = None

    def end_line(self) -> None:
        if self._middle is not None:
            self._put(self._middle, "\n")
            self._middle = None

    def _put(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()


class Keyboard:
    """Lines typed on the terminal. One reader at a time; `close` gives the terminal back."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._fd = sys.stdin.fileno() if descriptor is None else descriptor
        self._data = b""
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._reading = False

    def _start(self) -> None:
        if not self._reading:
            self._reading = True
            asyncio.get_running_loop().add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, 4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._data = (self._data + data)[-_LINE_BYTES_MAX:]
        *lines, self._data = self._data.split(b"\n")
        for line in lines:
            self._lines.put_nowait(line.decode("utf-8", "replace").strip())
        if not data:
            self.close()
            self._lines.put_nowait(None)

    def forget(self) -> None:
        """What was typed before a question is no answer to it; call this before the question is shown."""
        with contextlib.suppress(termios.error):  # not a terminal
            termios.tcflush(self._fd, termios.TCIFLUSH)
        self._data = b""
        while not self._lines.empty() and self._reading:
            self._lines.get_nowait()

    async def line(self) -> str | None:
        """The next line; None once the terminal is closed."""
        self._start()
        return await self._lines.get()

    def close(self) -> None:
        if self._reading:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self._fd)

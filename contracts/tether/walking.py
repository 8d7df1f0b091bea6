"""Walks over folders in which others work: what vanishes in between is not there, and is no fault.

`Path.rglob` raises FileNotFoundError where a folder goes between its name's reading and its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def entries_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below, links not followed; nothing where the folder is missing. Raises OSError for another reason."""
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as opened:
                found = list(opened)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            yield entry


def bytes_below(folder: Path) -> int:
    """Sum of the sizes of everything below, in bytes."""
    size = 0
    for entry in entries_below(folder):
        with contextlib.suppress(FileNotFoundError):
            size += entry.stat(follow_symlinks=False).st_size
    return size

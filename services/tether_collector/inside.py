"""Whether what was opened lies where it seemed to: asked of the descriptor, so nobody can change the answer.

A path is looked up name by name, and whoever may write to a folder on the way can put a link in its place between two
looks. What a descriptor refers to does not change: the kernel names its place, and that is what is compared.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def check_inside(descriptor: int, root: Path, path: Path) -> None:
    """Raises OSError (ELOOP) naming `path` where the open file or folder is not `root` or below it."""
    place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
    whole = root.resolve()
    if place != whole and whole not in place.parents:
        raise OSError(errno.ELOOP, "it leads out of its folder", str(path))

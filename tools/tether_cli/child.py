"""Runs a command that ends with its parent: `python -I -S child.py PARENT_PID COMMAND…`.

The kernel sends SIGTERM to the command when the process that started it dies, however it dies: nothing of a set
outlives the process that watches over it. The setting survives exec, so nothing stands between the two.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it died before the signal was armed
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Deleting what the volume has of one conversation (`tether.deletion`): files first, then the journal's rows.

    .tether/executions/{execution}            spool, keeper's records
    .tether/execution-recovery/{execution}…   final snapshots
    .tether/recovery-material/{execution}-…   what a process after a lost session was given
    .tether/checkpoints                       every manifest: each covers the whole sandbox, and tells of its executions
    .tether/sessions/{session}.json           what is known of the agents' own sessions
    .tether/agents/…                          the agents' own files: those whose name has the session's id, and in files
                                              that several sessions share (`history.jsonl`) the lines that name it
    .tether/journal.sqlite3                   rows, then the whole file is written anew, and its write-ahead log emptied

The rows name the executions and so go last: a crash in between leaves something to be deleted again. The user's files
in the workspace are the user's and stay, whatever an agent wrote into them on the conversation's behalf. Agents own the
folders below `.tether/agents` and may put links there: they are walked by descriptors, and no link is followed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from tether.checkpoint import FOLDER as CHECKPOINTS
from tether.limits import MIB
from tether_collector import material, native_sessions
from tether_collector.journal import Journal
from tether_collector.recovery_files import delete_final

AGENTS: Final = "agents"
SHARED_SUFFIX: Final = ".jsonl"
SHARED_BYTES_MAX: Final = 64 * MIB  # of a file that several sessions share
SESSION_CHARS_MIN: Final = 8  # a shorter name would be found in what has nothing to do with it


def delete_files(workspace_dir: Path, executions: Sequence[str], sessions: Sequence[str]) -> int:
    """What lies on the volume of these executions and of the agents' own sessions; how many files. Raises OSError."""
    state_dir = workspace_dir / ".tether"
    count = 0
    for execution in executions:
        delete_final(state_dir, execution)
        folder = state_dir / "executions" / execution
        if folder.exists():
            shutil.rmtree(folder)
            count += 1
    wanted = frozenset(executions)
    count += _unlink(state_dir / material.FOLDER, lambda name: name.rpartition("-")[0] in wanted)
    count += _delete_checkpoints(workspace_dir / CHECKPOINTS)
    count += _unlink(state_dir / native_sessions.FOLDER, lambda name: name.removesuffix(".json") in sessions)
    return count + delete_sessions(state_dir / AGENTS, sessions)


def _unlink(folder: Path, doomed: Callable[[str], bool]) -> int:
    count = 0
    with suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            if doomed(path.name):
                path.unlink(missing_ok=True)
                count += 1
    return count


def _delete_checkpoints(folder: Path) -> int:
    """Manifests, and what a checkpoint that was given up left."""
    count = 0
    with suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            count += 1
    return count


def delete_sessions(folder: Path, sessions: Sequence[str]) -> int:
    """The agents' own files of these sessions, and what shared files say of them. Raises OSError."""
    names = [session for session in sessions if len(session) >= SESSION_CHARS_MIN and "/" not in session]
    if not names or not folder.is_dir():
        return 0
    count = 0
    for _, folders, files, descriptor in os.fwalk(folder, topdown=False, follow_symlinks=False):
        for name in files:
            if any(session in name for session in names):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=descriptor)
                count += 1
            elif name.endswith(SHARED_SUFFIX):
                count += _blank_lines(descriptor, name, names)
        for name in folders:
            if any(session in name for session in names):
                count += _remove_folder(descriptor, name)
    return count


def _remove_folder(descriptor: int, name: str) -> int:
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=descriptor)
            return 1
        shutil.rmtree(name, dir_fd=descriptor)
    except FileNotFoundError:
        return 0
    return 1


def _blank_lines(folder: int, name: str, sessions: Sequence[str]) -> int:
    """Write `{}` and blanks over each line that names one of the sessions, in place: an agent that appends to the same
    file meanwhile loses nothing. 1 where something was."""
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return 0  # a link, gone, or nothing that can be written: an agent's own business
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or not 0 < facts.st_size <= SHARED_BYTES_MAX:
            return 0
        data = os.pread(descriptor, facts.st_size, 0)
        found = False
        for match in re.finditer(rb"[^\n]+", data):
            line = match[0]
            if any(json.dumps(session).encode() in line for session in sessions):
                os.pwrite(descriptor, b"{}".ljust(len(line)), match.start())
                found = True
        if found:
            os.fsync(descriptor)
        return int(found)
    finally:
        os.close(descriptor)


def forget_on_disk(workspace_dir: Path, conversation: str, sessions: Sequence[str]) -> tuple[str, int, int]:
    """For a volume that no collector holds (the caller has its lock): what it waits for, or an empty text, and how many
    executions and files are gone. Raises OSError, sqlite3.Error, JournalError."""
    path = workspace_dir / ".tether" / "journal.sqlite3"
    if not path.exists():
        return "", 0, delete_files(workspace_dir, (), sessions)
    with closing(Journal(path)) as journal:
        known = journal.of_conversation(conversation)
        if known.unended:
            return f"execution {known.unended[0]} is not told to its end", 0, 0
        if (drain := journal.drain()) is not None and not drain.over:
            return f"drain {drain.drain} is under way", 0, 0
        files = delete_files(workspace_dir, known.executions, tuple({*sessions, *known.sessions}))
        journal.forget_conversation(conversation)
        return "", len(known.executions), files

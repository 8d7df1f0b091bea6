"""Which files of a workspace belong to a checkpoint, by rule alone. Pure: paths in, verdicts out.

    .tether/agents/{agent}/…            session     the agents' config homes: their sessions, settings, memory
    .tether/journal.sqlite3             state       as a consistent copy
    .tether/execution-recovery/…        state       final snapshots
    .tether/recovery-material/…         state       histories that are given in place of sessions
    .tether/sessions/…                  state       what is known of the sessions' own files
    anything else below .tether         left out    spools, locks, checkpoints themselves
    everything else                     workspace   only where the order includes the workspace

Left out of the config homes, each named in the manifest with its reason:

    credentials   files by which a CLI proves who it is: they come from the provider again, and are nobody's to copy.
                  So do the shell's snapshots, which hold the environment, and claude's own settings with parts of keys
    lock          locks and registries of living processes: of the old place they say nothing but a lie
    cache         what a CLI makes again: caches, logs, downloads; codex's sqlite files, beside sessions that are text

A symbolic link is kept as a link, wherever it leads; nothing is read through one. A socket, a fifo or a device is
`special_file`, and left out wherever it lies.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Final, Literal

from tether.checkpoint import Include
from tether.limits import CHECKPOINT_BYTES_MAX, CHECKPOINT_FILES_MAX, MIB

Kind = Literal["session", "state", "workspace"]
Why = Literal["credentials", "lock", "cache", "special_file", "internal"]
STATE_FOLDER: Final = ".tether"
JOURNAL: Final = ".tether/journal.sqlite3"
AGENTS: Final = ".tether/agents"
_STATE: Final = frozenset({"execution-recovery", "recovery-material", "sessions"})
PATH_BYTES_MAX: Final = 4096
DEPTH_MAX: Final = 256  # folders that lie in one another; who walks through them needs a stack
_CREDENTIALS: Final = (
    "auth.json", "mcp-auth.json", ".credentials.json", "credentials.json", "*.credentials.json", "oauth_creds.json",
    "google_accounts.json", "mcp-oauth-tokens*.json", ".env", "*.pem", "*.key", ".netrc", ".claude.json*",
    "shell_snapshots", "shell-snapshots", "backups",
)  # fmt: skip
_LOCKS: Final = ("*.lock", "*.lck", "*.pid", "thread-writer-locks", "ide")
_CACHES: Final = (
    "cache", "caches", ".cache", "*.tmp", "log", "logs", "debug", "statsig", "telemetry", "node_modules", "bin",
    "paste-cache", "stats-cache.json",
)  # fmt: skip
_CODEX_CACHES: Final = (
    "*.sqlite", "*.sqlite-wal", "*.sqlite-shm", "*.sqlite3", "models_cache.json", "version.json", "tmp", ".tmp",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Take:
    """It belongs to the checkpoint; of a folder: what is in it is to be looked at."""

    kind: Kind


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """It does not, with everything below it. `said`: the manifest names it."""

    why: Why
    said: bool = True


Verdict = Take | LeaveOut


def judge(path: str, include: Include, *, folder: bool) -> Verdict:
    """Of a file, a link or a folder, by its path relative to the workspace."""
    parts = path.split("/")
    if parts[0] != STATE_FOLDER:
        if include == "workspace" and not (len(parts) == 1 and _is_ours(parts[0])):
            return Take("workspace")
        return LeaveOut("internal", said=False)
    if len(parts) == 1:
        return Take("state") if folder else LeaveOut("internal", said=False)
    match parts[1]:
        case "agents":
            return _of_agent(parts[2:], folder) if len(parts) > 2 else _folder(folder, "session")
        case name if name in _STATE:
            return _folder(folder, "state") if len(parts) == 2 else _own_state(parts[-1])
        case _:
            return LeaveOut("internal", said=False)


def _is_ours(name: str) -> bool:
    """A restore that was under way, beside the state folder."""
    return name == ".tether-restore" or name == "lost+found"


def _folder(folder: bool, kind: Kind) -> Verdict:
    return Take(kind) if folder else LeaveOut("internal", said=False)


def _own_state(name: str) -> Verdict:
    return LeaveOut("internal", said=False) if name.endswith(".tmp") else Take("state")


def _of_agent(parts: list[str], folder: bool) -> Verdict:
    """`parts`: the config home's name, then the path in it."""
    if len(parts) == 1:
        return _folder(folder, "session")
    name, home = parts[-1], parts[0]
    if _any(name, _CREDENTIALS):
        return LeaveOut("credentials")
    if _any(name, _LOCKS) or (home.startswith("claude") and parts[1] == "sessions"):
        return LeaveOut("lock")
    if _any(name, _CACHES) or ("codex" in home and _any(name, _CODEX_CACHES)):
        return LeaveOut("cache")
    return Take("session")


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def too_much(files: int, size_bytes: int) -> str | None:
    """By name, what is more than a checkpoint may have."""
    if files > CHECKPOINT_FILES_MAX:
        return f"the checkpoint has more than {CHECKPOINT_FILES_MAX} files"
    if size_bytes > CHECKPOINT_BYTES_MAX:
        return f"the checkpoint has more than {CHECKPOINT_BYTES_MAX // MIB} MiB"
    return None


def bad_path(path: str) -> str | None:
    """Why a manifest cannot name it. A path that is no UTF-8 has surrogates in it."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    return f"its path is longer than {PATH_BYTES_MAX} bytes" if len(encoded) > PATH_BYTES_MAX else None


def too_deep(path: str) -> str | None:
    """By name, where it lies below more folders than a checkpoint may have."""
    return f"it lies more than {DEPTH_MAX} folders deep" if path.count("/") > DEPTH_MAX else None


def unsafe_path(path: str) -> str | None:
    """Why a file of a manifest must not be written, or None. Nothing outside the workspace is ever named."""
    if not path or path.startswith("/") or "\x00" in path:
        return "is not relative"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is not made of plain names"
    if any(len(part.encode("utf-8", "replace")) > 255 for part in parts):
        return "has a name that is too long"
    if (why := too_deep(path)) is not None:
        return why
    if parts[0] == ".tether-restore":
        return "is in the restore's own folder"
    return None

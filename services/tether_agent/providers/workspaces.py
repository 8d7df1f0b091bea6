"""Which directory a workspace is: one below the workspaces' root, or one that its user named.

A user's directory is named once, before the workspace's sandbox exists, over `tether.agent.workspace`; the mapping is
kept in `{state}/workspaces.json`. A path is taken as it is written or not at all: absolute, normal, existing, and free
of symlinks (what is checked is what will be used, and it is checked again before each start of a sandbox).
"""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any, Final

from tether.errors import Code, InvalidError, problem
from tether.ids import check_token
from tether.service import write_whole
from tether_agent.providers import ProvisionError

_PATH_BYTES_MAX: Final = 4096
_ENTRIES_MAX: Final = 10_000


def check_directory(path: object, *, state_dir: Path) -> Path:
    """`path` if it may be a workspace. Raises InvalidError that names the remedy."""
    if not isinstance(path, str) or not path or "\0" in path or len(path.encode("utf-8", "replace")) > _PATH_BYTES_MAX:
        raise InvalidError("path", f"must be a path of at most {_PATH_BYTES_MAX} bytes")
    if not path.startswith("/"):
        raise InvalidError("path", "must be absolute")
    if os.path.normpath(path) != path or path.startswith("//"):
        raise InvalidError("path", "must be normal: no '.', '..', double or trailing slash")
    real = os.path.realpath(path)
    if real != path:
        raise InvalidError("path", f"must not lead through a symlink; its real path is {real}")
    directory = Path(path)
    if not directory.is_dir():
        raise InvalidError("path", "must be an existing directory")
    state = Path(os.path.realpath(state_dir))
    if directory == Path("/") or directory == state or directory in state.parents or state in directory.parents:
        raise InvalidError("path", "must neither hold nor lie in the agent service's own state")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidError("path", "must be readable and writable for the agent service")
    return directory


def _group_of(user: str) -> int:
    number, _, group = user.partition(":")
    if group:
        return int(group)
    try:
        return (pwd.getpwuid(int(number)) if number.isdigit() else pwd.getpwnam(number)).pw_gid
    except KeyError:
        raise RuntimeError(f"TETHER_AGENT_CLI_USER: {user} is no user here; give UID:GID") from None


class Workspaces:
    """The mapping. One owner: the local provider, which holds the state directory's lock."""

    def __init__(self, root: Path, state_dir: Path, cli_user: str | None = None) -> None:
        """`cli_user`: whom CLIs run as, where not as the service: new directories are shared with its group, sticky,
        so that a CLI moves nothing of the collector's. Raises RuntimeError for one that is unknown."""
        self._group = None if cli_user is None else _group_of(cli_user)
        self._root = root
        self._state_dir = state_dir
        self._file = state_dir / "workspaces.json"
        self._mapped = self._load()

    def _load(self) -> dict[str, str]:
        try:
            value: Any = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            # Falling back to a fresh directory would show an agent an empty workspace: better not to start.
            raise RuntimeError(f"{self._file} is damaged ({error}); put it right or remove it") from None
        if not isinstance(value, dict) or not all(isinstance(path, str) for path in value.values()):
            raise RuntimeError(f"{self._file} is damaged; put it right or remove it")
        return dict(value)

    def assign(self, tenant: str, workspace: str, path: object, *, in_use: bool) -> Path:
        """Map a workspace to a directory. Raises InvalidError. The same again changes nothing."""
        key = f"{check_token(tenant, 'tenant')}.{check_token(workspace, 'workspace')}"
        directory = check_directory(path, state_dir=self._state_dir)
        known = self._mapped.get(key)
        if known == str(directory):
            return directory
        if known is not None:
            raise InvalidError("workspace", f"is the directory {known} already; use another workspace id")
        if in_use:
            raise InvalidError("workspace", "has a directory of its own already; use another workspace id")
        for other, taken in self._mapped.items():
            if taken == str(directory):
                raise InvalidError("path", f"is workspace {other.partition('.')[2]} already; use that id")
        if len(self._mapped) >= _ENTRIES_MAX:
            raise InvalidError("workspace", f"at most {_ENTRIES_MAX} directories can be mapped")
        changed = {**self._mapped, key: str(directory)}
        write_whole(self._file, json.dumps(changed, indent=1, sort_keys=True).encode())
        self._mapped = changed
        return directory

    def mapped(self, tenant: str, workspace: str) -> Path | None:
        """The directory that its user named, or None. Raises ProvisionError where it cannot be used."""
        named = f"{tenant}.{workspace}" in self._mapped
        return self.directory(tenant, workspace) if named else None

    def existing(self, tenant: str, workspace: str) -> Path | None:
        """The workspace's directory, where there is one. Raises ProvisionError where it cannot be used."""
        mapped = self.mapped(tenant, workspace)
        if mapped is not None:
            return mapped
        directory = self._root / check_token(tenant, "tenant") / check_token(workspace, "workspace")
        return self.directory(tenant, workspace) if directory.is_dir() else None

    def directory(self, tenant: str, workspace: str) -> Path:
        """The workspace's directory, made if it is one of ours. Raises ProvisionError."""
        mapped = self._mapped.get(f"{tenant}.{workspace}")
        if mapped is not None:
            try:
                return check_directory(mapped, state_dir=self._state_dir)
            except InvalidError as error:
                detail = f"the workspace's directory {mapped} cannot be used: {error.remedy}"
                raise ProvisionError(problem(Code.INVALID, detail)) from None
        directory = self._root / check_token(tenant, "tenant") / check_token(workspace, "workspace")
        try:
            fresh = not directory.exists()
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if fresh and self._group is not None:
                os.chown(directory, -1, self._group)
                directory.chmod(0o1770)
        except OSError as error:
            detail = f"the workspace's directory {directory} cannot be made: {error.strerror}"
            raise ProvisionError(problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=False)) from None
        if directory.is_symlink() or not directory.is_dir():
            detail = f"the workspace's directory {directory} is not a directory"
            raise ProvisionError(problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=False))
        return directory

"""What the agent service needs of whoever runs sandboxes.

A provider makes sure that a workspace's sandbox has a living collector, ends it on request, and says what is there.
`ensure` and `stop` are idempotent and serialised per workspace; a provider ends nothing that it cannot identify.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tether.deletion import ForgetPayload, Forgotten
from tether.errors import Problem


class ProvisionError(Exception):
    """No sandbox, and trying again changes nothing. `problem` is what the response fails with."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class NotReadyError(Exception):
    """No sandbox yet: try again later. `soon`: it is only waited for that a drain ends."""

    def __init__(self, reason: str, *, soon: bool = False) -> None:
        super().__init__(reason)
        self.soon = soon


@dataclass(frozen=True, slots=True)
class Compute:
    """A sandbox's compute as it runs. `boot` was drawn when the sandbox started; `facts` identify it."""

    tenant: str
    workspace: str
    sandbox: str
    boot: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """What a provider says about a sandbox. `alive`: its collector was seen just now. `ended`: nothing of it runs any
    more, since it was ended. `lost`: so it is, but its volume is away, and a collector may yet tell what is on it."""

    tenant: str
    workspace: str
    sandbox: str
    boot: str
    alive: bool
    facts: Mapping[str, Any] = field(default_factory=dict)
    ended: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """A sandbox that was ended. `killed`: processes that had to be killed after the collector was gone."""

    tenant: str
    workspace: str
    killed: int = 0


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing of a drained sandbox runs any more: `proof` says how that is known. `killed`: processes of it that were
    left, and had to be killed."""

    proof: str
    killed: int = 0


@dataclass(frozen=True, slots=True)
class Restarted:
    """A collector that was replaced under living CLIs. `before`, `instance`: instance ids, `before` None where none was
    registered. `version`: of the collector that runs now."""

    tenant: str
    workspace: str
    boot: str
    before: str | None
    instance: str
    version: str | None = None


class Provider(Protocol):
    """See the module's docstring."""

    @property
    def name(self) -> str: ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Adopt what runs, and watch it while the context is open. Leaving it ends no sandbox."""
        ...

    async def ensure(self, tenant: str, workspace: str, restore: str | None = None) -> Compute:
        """A collector is there and registered. `restore`: the checkpoint that a sandbox that begins now goes on from,
        which its collector brings back where the volume does not have it. Raises NotReadyError, ProvisionError."""
        ...

    async def release(self, tenant: str, workspace: str, boot: str) -> Gone | None:
        """Make sure that nothing is left of this boot, which was drained; a later boot is left alone. None where this
        provider does not know the sandbox. Idempotent. Raises NotReadyError where it cannot be proven yet."""
        ...

    async def manifest(self, tenant: str, workspace: str, checkpoint: str) -> bytes | None:
        """The checkpoint's manifest as it lies on the workspace's volume; None where it does not, or the volume is
        not to be reached from here."""
        ...

    async def stop(self, tenant: str, workspace: str) -> Stopped | None:
        """End the sandbox and whatever runs in it; None where there is none."""
        ...

    async def restart_collector(self, tenant: str, workspace: str) -> Restarted | None:
        """Replace the collector, and nothing else: keepers and CLIs live on and are adopted by the new one, which is
        the code that is installed now. None where there is no sandbox. Raises NotReadyError, ProvisionError."""
        ...

    async def stop_all(self) -> Sequence[Stopped]: ...

    async def forget(self, tenant: str, workspace: str, payload: ForgetPayload) -> Forgotten:
        """Delete what the workspace's volume has of a conversation, where no collector holds it and it is to be reached
        from here; else the answer says what that waits for. Idempotent."""
        ...

    def statuses(self) -> Sequence[Status]: ...

    def assign(self, tenant: str, workspace: str, path: str) -> str:
        """Use a directory of the user's for a workspace. Raises InvalidError; returns the path."""
        ...

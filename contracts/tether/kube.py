"""A sandbox on Kubernetes: the resource `AgentTask`, and who writes what of it. Data and names alone; no client.

    user ──────────▶ spec                           what is wanted
    agent service ─▶ annotations boot, compute, restore; Secret `{task}-{boot}`
                                                    which boot is to run, or that none is, and its credentials
    operator ──────▶ pod `{task}-{boot}`, claim, network policy; status
                                                    what runs, and `status.ended`: the proof that a boot is over

The agent service asks for compute and never makes a pod; the operator makes pods and never decides that one is needed.
There is no second pod for a task before the proof of the earlier boot's end: the kubelet's report that its containers
terminated, or an out-of-service taint of its node. That an object is absent proves nothing. So each pod carries the
finalizer PROOF: its object stays, also where it was deleted by force, until what the kubelet said is in the status.

A task carries the finalizer DRAIN from its creation on: it is drained and checkpointed before it goes.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from tether.errors import InvalidError
from tether.ids import Token, sandbox_id
from tether.prompt import Continuation, invalid

GROUP: Final = "tether.dev"
VERSION: Final = "v1alpha1"
KIND: Final = "AgentTask"
PLURAL: Final = "agenttasks"
DRAIN: Final = "tether.dev/drain"  # finalizer of a task
PROOF: Final = "tether.dev/proof"  # finalizer of its pods

BOOT: Final = "tether.dev/boot"  # annotation of a task: the boot that compute is asked for; label of its pods
COMPUTE: Final = "tether.dev/compute"  # annotation of a task: `run` or `stop`
RESTORE: Final = "tether.dev/restore"  # annotation of a task: the checkpoint that this boot goes on from
RECOVERY: Final = "tether.dev/recovery"  # annotation of a task: `true`, this boot tells the rest and starts nothing
TASK: Final = "tether.dev/task"  # label of all that belongs to a task
WORKSPACE_KEY: Final = "tether.dev/workspace"  # label of a task: `workspace_key`
SECRET_TYPE: Final = "tether.dev/boot"  # of the Secret with what a boot is told

Phase = Literal[
    "Pending", "Provisioning", "Running", "Idle", "Draining", "Suspended", "Resuming", "Completed", "Failed"
]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?|m)?$")]
Duration = Annotated[str, StringConstraints(pattern=r"^([0-9]+h)?([0-9]+m)?([0-9]+s)?$", min_length=2)]
DNS_LABEL_REMEDY: Final = "must be a DNS label: at most 63 of a-z 0-9 -, beginning and ending with a letter or digit"
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DURATION: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def seconds(duration: str) -> float:
    """Of `1h30m`, `90s`. Raises InvalidError."""
    found = _DURATION.fullmatch(duration)
    if not duration or found is None:
        raise InvalidError("duration", "must be like 90s, 30m or 1h30m")
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(hours * 3600 + minutes * 60 + rest)


class _Camel(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel, populate_by_name=True)


class WorkspaceSpec(_Camel):
    """`claim`: an existing PersistentVolumeClaim; else one of `size` is made. `name`: the workspace on the bus; unset,
    the task's own name."""

    name: Token | None = None
    claim: str | None = None
    size: Quantity = "10Gi"
    storage_class_name: str | None = None


class AgentSpecOfTask(_Camel):
    """`model_secret`: a Secret of the namespace whose entries become the CLI's environment, as `ANTHROPIC_API_KEY`."""

    kind: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9:._-]{0,63}$")] = "claude"
    image: str | None = None
    args: tuple[str, ...] = ()
    model: str | None = None
    model_secret: str | None = None


class TaskSpec(_Camel):
    """`prompt`: given once, when the task is made. `interactive`: it stays for further prompts; else the task is
    completed with the prompt's response."""

    prompt: str | None = None
    interactive: bool = True
    conversation: Token | None = None
    continuation: Continuation | None = None


class LifecycleSpec(_Camel):
    """`idle_timeout` unset: never by itself. `drain_deadline`: from the deletion on; then the task goes in any case."""

    idle_timeout: Duration | None = None
    on_delete: Literal["checkpoint", "delete"] = "checkpoint"
    drain_grace: Duration = "60s"
    drain_deadline: Duration = "120s"
    checkpoint_store: Literal["volume", "blobs", "both"] = "both"
    retain_volume: bool | None = None

    @property
    def keeps_volume(self) -> bool:
        """The volume outlives the task."""
        return self.on_delete == "checkpoint" if self.retain_volume is None else self.retain_volume


class AgentTaskSpec(_Camel):
    tenant: Token = "default"
    workspace: WorkspaceSpec = WorkspaceSpec()
    agent: AgentSpecOfTask = AgentSpecOfTask()
    task: TaskSpec = TaskSpec()
    lifecycle: LifecycleSpec = LifecycleSpec()
    suspend: bool = False
    resume_from: str | None = None


class Ended(_Camel):
    """`proof`: how it is known that nothing of `boot` runs. `code`: of its collector, None where that is not known.
    `at` in RFC 3339."""

    boot: str
    proof: str
    code: int | None = None
    at: str = ""


class Condition(_Camel):
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int = 0


class AgentTaskStatus(_Camel):
    phase: Phase = "Pending"
    boot: str | None = None
    ended: Ended | None = None
    checkpoint_ref: str | None = None
    sandbox: str | None = None
    conversation: str | None = None
    conditions: tuple[Condition, ...] = ()
    observed_generation: int = 0
    last_activity_time: str | None = None


def spec_of(value: object) -> AgentTaskSpec:
    """The spec of a task as the API has it. Raises InvalidError that names each field."""
    try:
        return AgentTaskSpec.model_validate(value)
    except ValidationError as error:
        raise invalid(error, "spec") from None


def status_of(value: object) -> AgentTaskStatus:
    """The status of a task; an empty one where it has none that can be read: it is made again from the facts."""
    try:
        return AgentTaskStatus.model_validate(value or {})
    except ValidationError:
        return AgentTaskStatus()


def check_name(value: str, field: str) -> str:
    """Raises InvalidError."""
    if _DNS_LABEL.fullmatch(value) is None:
        raise InvalidError(field, DNS_LABEL_REMEDY)
    return value


def workspace_of(name: str, spec: AgentTaskSpec) -> str:
    """The workspace of the task `name`."""
    return spec.workspace.name or name


def workspace_key(tenant: str, workspace: str) -> str:
    """A label's value for any two tokens: labels allow fewer characters, and ends of letters and digits."""
    return hashlib.sha256(f"{tenant}\x1f{workspace}".encode()).hexdigest()[:40]


def task_name(tenant: str, workspace: str) -> str:
    """Of the task that the agent service makes for a workspace that has none."""
    return sandbox_id(tenant, workspace).replace("_", "-").lower()


def boot_label(boot: str) -> str:
    """A boot id within a name: DNS labels have no underscore."""
    return boot.removeprefix("boot_").lower().replace("_", "-")


def _short(task: str, suffix: str) -> str:
    """`{task}-{suffix}`, at most 63 characters; a long task is told by its beginning and a digest."""
    if len(task) + len(suffix) + 1 <= 63:
        return f"{task}-{suffix}"
    digest = hashlib.sha256(task.encode()).hexdigest()[:8]
    return f"{task[: 63 - len(suffix) - 10].rstrip('-.')}-{digest}-{suffix}"


def pod_name(task: str, boot: str) -> str:
    return _short(task, boot_label(boot))


def secret_name(task: str, boot: str) -> str:
    return _short(task, boot_label(boot))


def claim_name(task: str) -> str:
    return _short(task, "workspace")


def policy_name(task: str) -> str:
    return _short(task, "sandbox")


def manifest(name: str, namespace: str, spec: AgentTaskSpec, annotations: dict[str, str]) -> dict[str, Any]:
    """A task as the agent service makes it: with its finalizer from the first moment on."""
    key = workspace_key(spec.tenant, workspace_of(name, spec))
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "tether", WORKSPACE_KEY: key},
            "annotations": annotations,
            "finalizers": [DRAIN],
        },
        "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True),
    }

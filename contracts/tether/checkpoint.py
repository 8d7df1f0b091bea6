"""Checkpoints: what of a sandbox is kept when it is drained, and who may go on from it.

    collector, drained                           bucket `tether_checkpoints/{tenant}.{workspace}`
      files by rule ─▶ digests ─▶ manifest ─▶ (blobs) ─▶ reference by compare-and-set ─▶ execution.ended{drained}

A manifest lists every execution that the drain met and every file by path, size and digest. It lies on the volume,
`.tether/checkpoints/{checkpoint}.json`, and, where blobs are configured, as a blob of kind `checkpoint`, as does each
file. The **reference** names the manifest by its digest: it is written last, so one that can be read means that what it
names was whole. A torn or foreign manifest is refused by that digest.

The reference's revision is the token of a resume: an owner record that goes to `starting` carries it, by the same
compare-and-set that makes its generation the only one that may go on from the checkpoint.

`include` says which files: `sessions` are the agents' session files, the journal and the recovery material; `workspace`
is all of these and the user's files. What was not included comes back with the volume only, and the reference says so.
What a rule keeps out of the folders that are included (credentials, locks, caches, sockets) is named in the manifest.

A resume on a volume that is empty restores the files from the blobs before the collector registers. Where that cannot
be done nothing of it is left, the collector ends with RESTORE_FAILED_EXIT, and RESTORE_FAILED on the volume says why.
So does a collector whose volume is another workspace's, which VOLUME on it tells: nothing of that volume is used.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from tether.errors import InvalidError, Problem
from tether.ids import ExecutionTarget, Token
from tether.jsonsafe import loads_object
from tether.limits import CHECKPOINT_FILES_MAX, CHECKPOINT_MANIFEST_BYTES_MAX
from tether.prompt import AgentSpec, invalid

Include = Literal["sessions", "workspace"]
Store = Literal["volume", "blobs", "both"]
DrainOutcome = Literal["completed", "graceful", "forced", "checkpoint_failed"]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

FOLDER: Final = ".tether/checkpoints"  # of the workspace's volume
RESTORED: Final = ".tether/restored.json"  # a `Restored`: what the volume was filled with, there where it was
RESTORE_FAILED: Final = ".tether/restore-failed.json"  # a `RestoreFailure`, there until a restore succeeds
RESTORE_FAILED_EXIT: Final = 78  # of a collector whose checkpoint cannot be restored: another start changes nothing
VOLUME: Final = ".tether/volume.json"  # a `VolumeIdentity`, written once and in no checkpoint
LEFT_OUT_MAX: Final = 1000  # named in a manifest; more are counted
KEPT_MAX: Final = 8  # manifests on the volume, as the bucket keeps so many references
UNHEARD_MAX: Final = 8  # messages that are named of one execution; more are counted
UNHEARD_CHARS_MAX: Final = 2000  # of one of them
UNHEARD_TOTAL_CHARS_MAX: Final = 16 * 1024  # of all in one report: it is a record
MEDIA: Final = "application/octet-stream"  # of a file's blob; the manifest's is json


class CheckpointFile(BaseModel):
    """A regular file below the workspace. `path` is relative, of plain names, `/` between them; `mode` its permission
    bits. A symbolic link has `link`, its target as it is written, and no content."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    bytes: Annotated[int, Field(ge=0)]
    digest: Digest
    mode: Annotated[int, Field(ge=0, le=0o777)] = 0o600
    kind: Literal["session", "state", "workspace"]
    link: Annotated[str, StringConstraints(max_length=4096)] | None = None


class UnheardMessage(BaseModel):
    """A message that had joined a turn and that its agent had not read when the turn was cut. `text`: its beginning,
    where `cut`; `request` names the whole."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    request: Token
    text: Annotated[str, StringConstraints(max_length=UNHEARD_CHARS_MAX)] = ""
    cut: bool = False


class DrainedExecution(BaseModel):
    """What became of one execution.

    `outcome`: `completed` ended by itself, before or within its share of the grace; `graceful` left on SIGTERM;
    `forced` was killed: the checkpoint has what was on disk. `interrupted`: names of the tools that were cut.
    `cut`: its turn was under way and is not finished. `last_ordinal`: the log's last event when the checkpoint was
    made. `resumable`: the CLI's session is known to be found again. `spec`: how the agent was asked for, for the
    continuation of a turn that was cut. `unheard`: messages that had joined that turn and were not read, in order;
    `unheard_more`: how many more there were. An execution that an earlier drain cut, and whose conversation has not
    started since, is told of again.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    target: ExecutionTarget
    outcome: DrainOutcome
    agent: str = ""
    spec: AgentSpec | None = None
    cli_version: str | None = None
    native_session: str | None = None
    resumable: bool = False
    cut: bool = False
    interrupted: tuple[str, ...] = ()
    unheard: Annotated[tuple[UnheardMessage, ...], Field(max_length=UNHEARD_MAX)] = ()
    unheard_more: Annotated[int, Field(ge=0)] = 0
    continuation: Literal["wait", "continue"] = "wait"
    last_ordinal: int = 0
    detail: str | None = None


class LeftOut(BaseModel):
    """What a rule kept out, with everything below it. `why`: credentials | lock | cache | special_file | internal |
    vanished."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    why: Annotated[str, StringConstraints(max_length=64)]


class CheckpointManifest(BaseModel):
    """See the module. `clean`: no execution was forced. `created_at` in unix milliseconds. `empty_folders`: those that
    no file of it names. `left_out_more`: how many more were left out than are named."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    checkpoint: Token
    drain: Token
    tenant: Token
    workspace: Token
    sandbox: Token
    boot: Token
    created_at: int
    reason: str = ""
    include: Include
    clean: bool
    executions: tuple[DrainedExecution, ...] = ()
    files: Annotated[tuple[CheckpointFile, ...], Field(max_length=CHECKPOINT_FILES_MAX)] = ()
    empty_folders: Annotated[tuple[str, ...], Field(max_length=CHECKPOINT_FILES_MAX)] = ()
    left_out: Annotated[tuple[LeftOut, ...], Field(max_length=LEFT_OUT_MAX)] = ()
    left_out_more: Annotated[int, Field(ge=0)] = 0

    def encode(self) -> bytes:
        """The bytes whose digest the reference names."""
        return self.model_dump_json(exclude_none=True).encode()

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)


def digest_of(data: bytes) -> str:
    """sha-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def decode_manifest(data: bytes, reference: CheckpointReference) -> CheckpointManifest:
    """The manifest that the reference names. Raises InvalidError: another digest, or what it says is not of this
    sandbox."""
    if len(data) != reference.manifest_bytes or digest_of(data) != reference.manifest:
        raise InvalidError("manifest", "is not the one that the reference names: torn, or another's")
    value = loads_object(data, "manifest", bytes_max=CHECKPOINT_MANIFEST_BYTES_MAX)
    try:
        manifest = CheckpointManifest.model_validate(value)
    except ValidationError as error:
        raise invalid(error, "manifest") from None
    for name in ("checkpoint", "drain", "tenant", "workspace", "sandbox"):
        if getattr(manifest, name) != getattr(reference, name):
            raise InvalidError(f"manifest.{name}", "is not that of the reference")
    return manifest


class CheckpointReference(BaseModel):
    """`tether_checkpoints/{tenant}.{workspace}`: written by the collector that was drained, by compare-and-set.

    `manifest`, `manifest_bytes`: sha-256 and size of the manifest. `stored`: where it and its files are. `may_use`:
    conversation → the one execution generation that may go on from it. `last_drained`: the executions, without files.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    op: str = ""
    checkpoint: Token
    drain: Token
    tenant: Token
    workspace: Token
    sandbox: Token
    boot: Token
    manifest: Digest
    manifest_bytes: Annotated[int, Field(ge=0, le=CHECKPOINT_MANIFEST_BYTES_MAX)]
    stored: Store
    include: Include
    clean: bool
    files: int = 0
    size_bytes: int = 0
    executions: tuple[DrainedExecution, ...] = ()
    may_use: dict[Token, int] = Field(default_factory=dict)
    created_at: int = 0

    def value(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"op"})


class Restored(BaseModel):
    """RESTORED: the volume was filled from this checkpoint. `at` in unix milliseconds."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    checkpoint: Token
    revision: int
    manifest: Digest
    include: Include
    boot: Token
    at: int


class RestoreFailure(BaseModel):
    """RESTORE_FAILED: why the collector of `boot` did not start. `problem` is a RESUME_FAILED for whoever resumed.

    `revision`: of the reference that was to be restored, as it was asked for. `at` in unix milliseconds."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    checkpoint: str
    revision: int = 0
    boot: str
    problem: Problem
    at: int


class VolumeIdentity(BaseModel):
    """VOLUME: whose it is. The first collector that starts on a volume writes it, once."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    tenant: Token
    workspace: Token

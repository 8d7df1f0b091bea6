"""A directory of the user's as a workspace: the same directory is the same workspace id, whoever asks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tether import subjects
from tether.bus import connect
from tether.errors import BusError, Problem
from tether_cli.output import CliError, Exit, from_problem
from tether_cli.state import SetState

_ANSWER_S = 5.0


def workspace_id(directory: Path) -> str:
    """Derived from the real path, so that every `run --workspace DIR` on it meets the same sandbox."""
    return "ws_" + hashlib.sha256(str(directory).encode("utf-8", "surrogateescape")).hexdigest()[:24]


async def assign(up: SetState, path: Path) -> str:
    """Tell the agent service that this directory is a workspace; returns the workspace id. Raises CliError."""
    directory = path.expanduser().resolve()  # noqa: ASYNC240 - a look at a local path
    if not directory.is_dir():
        raise CliError(f"{directory} is not a directory", remedy="create it first", exit_code=Exit.USAGE)
    workspace = workspace_id(directory)
    request = {"tenant": up.tenant, "workspace": workspace, "path": str(directory)}
    try:
        async with await connect(
            up.nats_url, name="tether-cli", creds_file=up.nats_creds_file, connect_timeout_s=5.0
        ) as bus:
            answer = await bus.request(subjects.agent("workspace"), json.dumps(request).encode(), timeout_s=_ANSWER_S)
    except BusError as error:
        raise CliError(
            f"the agent service did not take the workspace: {error}",
            remedy="see `tether doctor`",
            exit_code=Exit.UNREACHABLE,
        ) from None
    value = json.loads(answer.data)
    if "problem" in value:
        raise from_problem(Problem.model_validate(value["problem"]))
    return workspace

"""`tether webhooks`: where notifications go, what waits, what nobody took, and putting it back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output

_STATES: Final = ("pending", "delivered", "dead")


def register(app: typer.Typer) -> None:
    app.command("webhooks")(webhooks)


def webhooks(
    state: Annotated[str | None, typer.Option(help=f"Only notifications in this state: {', '.join(_STATES)}.")] = None,
    retry: Annotated[str | None, typer.Option(metavar="ENDPOINT/ID", help="Send this one again, now.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="At most so many, the last written first.")] = 50,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List notifications and what became of them, or send a dead one again."""
    from tether_cli import talk

    if state is not None and state not in _STATES:
        raise CliError(f"--state must be one of {', '.join(_STATES)}", exit_code=Exit.USAGE)
    talk.run(_webhooks(state, retry, limit, data, Output(as_json)))


async def _webhooks(state: str | None, retry: str | None, limit: int, data: Path | None, output: Output) -> None:
    from tether_cli import state as sets
    from tether_cli.render import duration

    running = sets.require(data)
    if retry is not None:
        endpoint, _, notification = retry.partition("/")
        if not endpoint or not notification:
            raise CliError("--retry: must be ENDPOINT/ID, as the list shows them", exit_code=Exit.USAGE)
        now = await _asked(running, "POST", f"/v1/webhooks/deliveries/{endpoint}/{notification}/retry", {})
        output.value(now)
        output.note(f"{notification} is {now['state']}")
        return
    params: dict[str, Any] = {"limit": limit, **({"state": state} if state is not None else {})}
    found = await _asked(running, "GET", "/v1/webhooks/deliveries", params)
    output.value(found)
    now_s = time.time()
    output.table(
        ("NOTIFICATION", "KIND", "CONVERSATION", "STATE", "ATTEMPTS", "AGE", "LAST"),
        (
            (
                f"{one['endpoint']}/{one['id']}",
                one["kind"],
                one["conversation"],
                one["state"],
                one["attempts"],
                duration(max(0.0, now_s - one["created_at"] / 1000)),
                one.get("error") or one.get("status") or "",
            )
            for one in found["deliveries"]
        ),
    )
    if found["omitted"]:
        output.note(f"there are {found['omitted']} more; --limit shows more")


async def _asked(running: Any, method: str, path: str, params: dict[str, Any]) -> dict[str, Any]:
    import httpx2

    from tether.errors import Code, Problem, ProblemError
    from tether_cli import talk

    headers = {"Authorization": f"Bearer {running.token}"}
    try:
        async with httpx2.AsyncClient(base_url=running.http_url, headers=headers, timeout=30.0) as client:
            answer = await client.request(method, path, params=params)
    except httpx2.HTTPError as error:
        raise CliError(f"the set cannot be reached: {type(error).__name__}", exit_code=Exit.UNREACHABLE) from None
    if answer.is_error:
        problem = Problem.model_validate_json(answer.content)
        told = talk.as_cli_error(ProblemError(problem))
        if problem.code is Code.NOT_FOUND:
            told.remedy = "`tether webhooks` lists notifications as ENDPOINT/ID"
        raise told
    found: dict[str, Any] = answer.json()
    return found

"""Loaded by Schemathesis (`SCHEMATHESIS_HOOKS`): everything that starts an agent does it in one workspace; and a check
of what is said where the service, and not its caller, is at fault.

Each workspace is a sandbox of its own, so a run that draws names would start hundreds of them. What is refused before
a sandbox is thought of is left as it was drawn.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis

from tether.ids import TOKEN_PATTERN

WORKSPACE = "fuzz"
CONVERSATION = "fuzz"  # the one that is asked by hand meanwhile, and has to answer at the end
_TOKEN = re.compile(TOKEN_PATTERN)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """`workspace` of a message: left out or a name, it is ours. Our own conversation is not deleted."""
    if case.method.upper() == "DELETE" and (case.path_parameters or {}).get("conversation") == CONVERSATION:
        case.path_parameters["conversation"] = "another"
    if case.operation.path.endswith("/messages") and case.method.upper() == "POST" and isinstance(case.body, dict):
        named = case.body.get("workspace", WORKSPACE)
        if isinstance(named, str) and _TOKEN.fullmatch(named):
            case.body["workspace"] = WORKSPACE


@schemathesis.check
def a_failure_of_the_service_is_typed(context: Any, response: Any, case: Any) -> None:
    """Never 500; what else is 5xx is a problem document with its code."""
    if response.status_code >= 500:
        told = response.json()
        assert response.status_code != 500, f"the request failed there: {told}"
        assert told["code"] and isinstance(told["retryable"], bool), told

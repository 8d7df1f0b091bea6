"""The reference page of permissions on NATS, from the table itself."""

from __future__ import annotations

from typing import Final

from tether import permissions
from tether.nkey_jwt import Allowed

TENANT: Final = "TENANT"
WORKSPACE: Final = "WORKSPACE"
_HEAD: Final = """# Permissions on NATS

Written by `make generate` from `contracts/tether/permissions.py`; do not edit. For one tenant, `TENANT`; with more than
{many} of them, tenants are `*`. `tether nats-permissions` prints the same for your tenants. What it is for, and what it
is no fence against: [how to keep sandboxes apart on NATS](../how-to/nats-permissions.md).
"""
_SANDBOX: Final = """## Sandboxes

Of the sandboxes of the workspace `WORKSPACE`, in an account of its own which imports this from the services' account,
and nothing else. `SANDBOX` is derived from tenant and workspace.
"""


def _block(title: str, subjects: tuple[str, ...]) -> str:
    return f"{title}:\n\n```\n" + "\n".join(subjects) + "\n```\n"


def _role(name: str, about: str, allowed: Allowed) -> str:
    answers = "It may answer what it is asked, once, wherever that says.\n" if allowed.responses else ""
    parts = [f"## {name}\n", f"{about[0].upper()}{about[1:]}. {answers}".rstrip() + "\n"]
    return "\n".join([*parts, _block("Publishes to", allowed.publish), _block("Hears", allowed.subscribe)])


def page() -> str:
    parts = [_HEAD.format(many=permissions.TENANTS_NAMED_MAX), _SANDBOX]
    rows = [
        f"| {'hears' if use.kind == 'stream' else 'publishes to'} | `{use.subject}` | {use.why} |"
        for use in permissions.sandbox_uses(TENANT, WORKSPACE, "SANDBOX")
    ]
    parts.append("| | subject | to |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    inbox = permissions.sandbox_inbox(TENANT, WORKSPACE)
    parts.append(f"Answers come to `{inbox}.>`, which it hears and publishes to.\n")
    for role in permissions.ROLES:
        parts.append(_role(role, permissions.ABOUT[role], permissions.service(role, [TENANT])))
    return "\n".join(parts)

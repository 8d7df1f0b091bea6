"""A service whose leases and ack waits last two seconds, for tests that outlast them: run by path, with the name of
its package. The numbers are changed before anything of it is imported; all else is the service as it is."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any, Final

from tether import limits

LEASE_S: Final = 2  # whole seconds: the server refuses fractions
RENEW_S: Final = 0.6
SHORTER: Final[dict[str, Any]] = {
    "CONTROL_LEASE_TTL_S": LEASE_S,
    "CONTROL_LEASE_RENEW_S": RENEW_S,
    "REGISTRATION_TTL_S": LEASE_S,
    "REGISTRATION_RENEW_S": RENEW_S,
    "ACK_WAIT_S": float(LEASE_S),
    "PROMPT_ACK_WAIT_S": float(LEASE_S),
    "COMMAND_ACK_WAIT_S": float(LEASE_S),
}


def _also(package: str) -> None:
    """Of the service alone."""
    if package == "tether_backend":
        for name in ("tether_backend.service", "tether_backend.webhooks.service"):
            vars(importlib.import_module(name)).update(LEASE_TTL_S=LEASE_S, LEASE_RENEW_S=RENEW_S)
    if package == "tether_agent":
        from tether_agent.service import serve

        defaults = serve.__kwdefaults__
        assert defaults is not None and "command" in defaults
        defaults["command"] = (sys.executable, "-P", str(Path(__file__).resolve()), "tether_collector")


if __name__ == "__main__":
    vars(limits).update(SHORTER)
    package = sys.argv.pop(1)
    sys.argv[0] = package
    _also(package)
    main = importlib.import_module(f"{package}.__main__").main
    sys.exit(main(sys.argv[1:]) if inspect.signature(main).parameters else main())

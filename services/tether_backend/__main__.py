"""`python -m tether_backend`: configuration from TETHER_*, see `config.BackendSettings`."""

from __future__ import annotations

import asyncio
import sys

from tether.service import run as run_service
from tether.settings import ConfigurationError, load_or_exit
from tether_backend.config import BackendSettings, load_tokens
from tether_backend.service import run


def main() -> int:
    settings = load_or_exit(BackendSettings)
    try:
        load_tokens(settings.http_tokens_file, settings.tenant_names)
    except ConfigurationError as error:
        for line in error.problems:
            print(f"configuration: {line}", file=sys.stderr)
        return 78

    async def body(stop: asyncio.Event) -> None:
        await run(settings, stop)

    return run_service(body, settings, service="backend")


if __name__ == "__main__":
    raise SystemExit(main())

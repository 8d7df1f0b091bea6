"""`python -m fake_models [--port N] [--port-file F] [--log F] [--require-key KEY]`: serve until a signal comes.

The port file appears, whole, when the server listens. SIGTERM and SIGINT end it with exit code 0.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from fake_models.server import FakeModels


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fake_models", description="A scripted model server on loopback.")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--port-file", type=Path, help="written when the server listens")
    parser.add_argument("--log", type=Path, help="one JSON object per request is appended to it")
    parser.add_argument("--log-bodies", action="store_true", help="with the requests' bodies")
    parser.add_argument("--require-key", help="answer 401 to every other API key")
    arguments = parser.parse_args(argv)
    ends = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before threads start: they inherit the mask
    try:
        server = FakeModels(
            port=arguments.port,
            log=arguments.log,
            log_bodies=arguments.log_bodies,
            require_key=arguments.require_key,
        )
    except OSError as error:
        print(f"fake_models: {error}", file=sys.stderr)
        return 1
    with server:
        if arguments.port_file is not None:
            temporary = arguments.port_file.with_name(arguments.port_file.name + ".new")
            temporary.write_text(f"{server.port}\n", encoding="ascii")
            temporary.rename(arguments.port_file)
        print(server.port, flush=True)
        signal.sigwait(ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())

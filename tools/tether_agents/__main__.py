"""`python -m tether_agents install|find [all|NAME…] [--agents-dir DIR]`.

Prints one line for each; a failed install ends it. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 npm or its registry
cannot be reached.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tether_agents.install import EXIT_FAILED, EXIT_OK, InstallFailure, install_agent
from tether_agents.locate import FoundAgent, Problem, find_agent, load_pins


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tether_agents", description=__doc__)
    parser.add_argument("verb", choices=["install", "find"])
    pins = load_pins()
    usual = [name for name, pin in pins.items() if pin.by_default]
    names_help = f"all, or of: {', '.join(pins)}; without one {', '.join(usual)} are installed, and all are looked for"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names_help)
    parser.add_argument("--agents-dir", type=Path, help="folder that holds <name>/<version>")
    parser.add_argument("--npm", default="npm", help="the npm to use")
    arguments = parser.parse_args(argv)
    names = arguments.names or (usual if arguments.verb == "install" else ["all"])
    code = EXIT_OK
    for name in pins if "all" in names else names:
        outcome: FoundAgent | InstallFailure | Problem
        if arguments.verb == "install":
            outcome = install_agent(name, arguments.agents_dir, npm=arguments.npm)
        else:
            outcome = find_agent(name, arguments.agents_dir)
        if isinstance(outcome, InstallFailure):
            print(f"{name}: {outcome.message}", file=sys.stderr)
            return outcome.exit_code
        if isinstance(outcome, Problem):
            print(f"{name}: {outcome}", file=sys.stderr)
            code = EXIT_FAILED
            continue
        print(f"{name} {outcome.version} {' '.join(outcome.command)} ({outcome.source})", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())

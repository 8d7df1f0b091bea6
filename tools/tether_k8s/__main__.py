"""`python -m tether_k8s tools | readme [--check]`.

`tools` installs helm and kubectl into a cache and prints their paths. `readme` writes the table of values of the
chart's README anew; with --check it only says whether it has drifted. Exit codes: 0 done, 1 failed or drifted, 2 wrong
usage, 3 the registry cannot be reached.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tether_k8s import values_table
from tether_k8s.install import InstallError, UnreachableError, install

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "tether"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tether_k8s", description=__doc__)
    parser.add_argument("verb", choices=["tools", "readme"])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.verb == "readme":
        return _readme(check=arguments.check)
    try:
        for name, path in install().items():
            print(f"{name} {path}")
    except UnreachableError as error:
        print(f"the registry cannot be reached: {error}", file=sys.stderr)
        return 3
    except InstallError as error:
        print(f"not installed: {error}", file=sys.stderr)
        return 1
    return 0


def _readme(*, check: bool) -> int:
    path = CHART / "README.md"
    before = path.read_text(encoding="utf-8")
    after = values_table.replaced(before, values_table.table(CHART / "values.yaml"))
    if before == after:
        return 0
    if check:
        print("deploy/helm/tether/README.md has drifted: run `python -m tether_k8s readme`", file=sys.stderr)
        return 1
    path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

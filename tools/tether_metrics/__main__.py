"""`python -m tether_metrics docs/metrics.md` writes the tables anew; with `--check` it says whether they differ."""

from __future__ import annotations

import sys
from pathlib import Path

from tether_metrics import with_tables


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    paths = [Path(one) for one in arguments if one != "--check"]
    if len(paths) != 1:
        print("usage: python -m tether_metrics [--check] docs/metrics.md", file=sys.stderr)
        return 64
    present = paths[0].read_text(encoding="utf-8")
    wanted = with_tables(present)
    if present == wanted:
        return 0
    if check:
        print(f"{paths[0]}: differs from the code; run `python -m tether_metrics {paths[0]}`", file=sys.stderr)
        return 1
    paths[0].write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

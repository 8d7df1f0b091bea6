"""`python -m tether_schemas [--check] FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from tether_schemas import drift, write


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
    folder = Path(arguments[0] if arguments else "docs/schemas")
    if "--check" not in sys.argv[1:]:
        print(f"schemas: {write(folder)} written to {folder}")
        return 0
    found = drift(folder)
    for problem in found:
        print(f"{problem}; run `make generate`", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

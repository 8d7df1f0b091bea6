"""`python -m tether_schemas [--check] [DOCS]`: writes what docs/ has from the code, or says what differs."""

from __future__ import annotations

import sys
from pathlib import Path

from tether_schemas import drift, write


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
    folder = Path(arguments[0] if arguments else "docs")
    if "--check" not in sys.argv[1:]:
        print(f"contract documents: {write(folder)} written to {folder}")
        return 0
    found = drift(folder)
    for problem in found:
        print(f"{folder}/{problem}; run `make generate`", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

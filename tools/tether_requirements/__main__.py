"""`python -m tether_requirements tests/requirements.toml`: check and count."""

from __future__ import annotations

import sys
from pathlib import Path

from tether_requirements import load, problems


def main() -> int:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/requirements.toml")
    requirements = load(path)
    found = problems(requirements, path.resolve().parent.parent)
    for problem in found:
        print(problem, file=sys.stderr)
    proven = sum(bool(requirement.tests) and not requirement.open for requirement in requirements)
    partly = sum(bool(requirement.tests) and bool(requirement.open) for requirement in requirements)
    print(
        f"requirements: {len(requirements)}, covered {proven}, partly {partly}, "
        f"open {len(requirements) - proven - partly}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

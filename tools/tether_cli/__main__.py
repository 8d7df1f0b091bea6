"""`tether` and `python -m tether_cli`."""

from __future__ import annotations

import sys

from tether_cli import app


def main() -> None:
    """The console script's entry."""
    sys.exit(app.main())


if __name__ == "__main__":
    main()

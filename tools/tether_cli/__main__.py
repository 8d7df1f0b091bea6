"""`tether` and `python -m tether_cli`."""

from __future__ import annotations

import sys

# What the extra `cli` brings and the command cannot do without.
_OF_THE_EXTRA = frozenset({"typer", "httpx2"})


def main() -> None:
    """The console script's entry. Imports inside: a Ctrl-C while they run is one like every other."""
    try:
        from tether_cli import app

        code = app.main()
    except KeyboardInterrupt:
        code = 130
    except ModuleNotFoundError as error:
        if error.name not in _OF_THE_EXTRA:
            raise
        sys.stderr.write(f"tether: {error.name} is not installed; the command needs the extra: tether[cli]\n")
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()

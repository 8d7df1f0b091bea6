"""Entry point: `python -m scripted_agent [options]`, or `python path/to/scripted_agent[/__main__.py] [options]`."""

import sys

if not __package__:  # run by file path: make the package importable, whatever -I or -P took away
    from os.path import abspath, dirname

    sys.path.insert(0, dirname(dirname(abspath(__file__))))  # noqa: PTH100, PTH120

from scripted_agent.agent import main

if __name__ == "__main__":
    main(sys.argv[1:])

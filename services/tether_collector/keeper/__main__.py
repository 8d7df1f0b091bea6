"""Entry point of the keeper, run by file path: `python -S -E …/keeper/__main__.py --dir DIR`.

Kept tiny because a script is compiled at every start, unlike the modules it imports.
"""

import sys

if __name__ == "__main__":
    # The folder above the package goes to the end of the path: the standard library always wins over
    # whatever lies beside an installed distribution.
    sys.path[:] = [*sys.path[1:], __file__.rsplit("/", 3)[0]]
    from tether_collector.keeper.launch import main

    main(sys.argv[1:])

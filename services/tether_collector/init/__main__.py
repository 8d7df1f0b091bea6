"""`python -I -S …/init/__main__.py run FOLDER -- COMMAND…` is the sandbox's entry process.
`… put FOLDER` takes files for FOLDER from stdin."""

import sys

if __name__ == "__main__":
    # Behind the standard library, which always wins over whatever lies beside an installed distribution.
    sys.path[:] = [*sys.path, __file__.rsplit("/", 3)[0]]
    from tether_collector.init.run import main

    sys.exit(main(sys.argv[1:]))

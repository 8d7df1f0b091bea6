"""`python -m tether_images [SERVICE…]`: build the images, print their sizes. `--base local` needs no registry,
`--offline` no package index."""

from __future__ import annotations

import argparse
import sys

from tether_images.build import DEFAULT_BASE, SERVICES, build
from tether_images.engine import ImageError, unavailable

LOCAL = "local"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tether_images", description=__doc__)
    parser.add_argument("services", nargs="*", default=list(SERVICES), help="collector is the sandbox; default: all")
    parser.add_argument("--base", default=LOCAL, help=f"base image, as {DEFAULT_BASE}; default: made of this Python")
    parser.add_argument("--tag", default="local", help="of the images; default: local")
    parser.add_argument("--offline", action="store_true", help="pack the wheels out of this environment")
    chosen = parser.parse_args(arguments)
    reason = unavailable()
    if reason is not None:
        print(f"no container engine answers: {reason}", file=sys.stderr)
        return 3
    base_image = None if chosen.base == LOCAL else chosen.base
    try:
        for image in build(chosen.services, base_image=base_image, tag=chosen.tag, offline=chosen.offline):
            print(f"{image.name:<32} {image.size_bytes / 1e6:8.1f} MB")
    except ImageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

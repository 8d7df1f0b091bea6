"""`python -m tether_supply sbom | audit [--database all.zip] [--service NAME]`. See `audit` for the exit codes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tether_supply import audit, sbom
from tether_supply.lock import ROOT, LockError, files, pins


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tether_supply", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    bills = verbs.add_parser("sbom", help="CycloneDX JSON of each service and of everything")
    bills.add_argument("--folder", type=Path, default=sbom.FOLDER)
    checks = verbs.add_parser("audit", help="known vulnerabilities of what is locked")
    checks.add_argument("--database", type=Path, help="OSV's all.zip of PyPI: no network is used")
    checks.add_argument("--of", default="all", choices=list(files()), help="a service, or all")
    chosen = parser.parse_args(arguments)
    try:
        return _sbom(chosen.folder) if chosen.verb == "sbom" else _audit(chosen.of, chosen.database)
    except (sbom.SbomError, LockError) as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"the database cannot be read: {error}", file=sys.stderr)
        return audit.NOT_AUDITED


def _sbom(folder: Path) -> int:
    for name, path in sbom.write(folder).items():
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        print(f"{name:<12} {len(pins(files()[name])):4} packages   {shown}")
    return 0


def _audit(of: str, database: Path | None) -> int:
    path = files()[of]
    if database is not None:
        report = audit.by_database(pins(path), database)
    else:
        for service in audit.SERVICES:
            report = audit.by_service(path, service)
            if report.audited:
                break
    print(audit.show(report))
    return report.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

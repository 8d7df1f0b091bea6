"""Known vulnerabilities of what is locked. Three sources, the first that answers:

    --database FILE    OSV's own export of PyPI (`all.zip`), fetched at any time before: no network
    PyPI, then OSV     over the network, by pip-audit

Exit codes: 0 everything was audited and nothing is known; 1 something is; 2 wrong usage; 3 not everything could be
audited (no service answers, or it does not know the packages), which is no all-clear.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from tether_supply.lock import Pin, normalized

SERVICES: Final = ("pypi", "osv")
AUDIT_S: Final = 300.0
RECORD_BYTES_MAX: Final = 4 << 20
FOUND, NOT_AUDITED = 1, 3


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    version: str
    id: str
    fixed_in: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """`audited`: how many packages somebody could say something about. `missing`: those of which nobody could."""

    source: str
    audited: int
    findings: tuple[Finding, ...]
    missing: tuple[str, ...]

    @property
    def code(self) -> int:
        return FOUND if self.findings else NOT_AUDITED if self.missing else 0


def by_service(path: Path, service: str) -> Report:
    """What pip-audit finds out over the network. A service that cannot be reached, or does not know a package, leaves
    it unaudited."""
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--no-deps", "--disable-pip", "-r", str(path)]
    command += ["--vulnerability-service", service, "--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_S, check=False)
        return read_report(json.loads(done.stdout), service)
    except (subprocess.TimeoutExpired, ValueError):
        return Report(service, 0, (), ("everything",))


def read_report(value: Mapping[str, Any], source: str) -> Report:
    """Of pip-audit's JSON. Raises ValueError for another."""
    try:
        packages = list(value["dependencies"])
        findings = tuple(
            Finding(one["name"], one["version"], vuln["id"], tuple(vuln.get("fix_versions", ())))
            for one in packages
            for vuln in one.get("vulns", ())
        )
        missing = tuple(one["name"] for one in packages if "skip_reason" in one)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no report of pip-audit: {error}") from None
    return Report(source, len(packages) - len(missing), findings, missing)


def by_database(pins: Sequence[Pin], database: Path) -> Report:
    """Against OSV's export: a zip of one JSON record for each vulnerability. Raises OSError, ValueError."""
    wanted = {pin.name: pin for pin in pins}
    findings: list[Finding] = []
    records = 0
    with zipfile.ZipFile(database) as archive:
        for entry in archive.infolist():
            if not entry.filename.endswith(".json") or entry.file_size > RECORD_BYTES_MAX:
                continue
            records += 1
            findings += _matches(json.loads(archive.read(entry)), wanted)
    if not records:
        raise ValueError(f"{database} holds no records; fetch OSV's all.zip of PyPI")
    return Report(str(database), len(pins), tuple(findings), ())


def _matches(record: Mapping[str, Any], wanted: Mapping[str, Pin]) -> Iterable[Finding]:
    if record.get("withdrawn"):
        return
    for affected in record.get("affected", ()):
        package = affected.get("package", {})
        pin = wanted.get(normalized(str(package.get("name", ""))))
        if pin is None or package.get("ecosystem") != "PyPI":
            continue
        events = [each.get("events", ()) for each in affected.get("ranges", ()) if each.get("type") == "ECOSYSTEM"]
        if pin.version in affected.get("versions", ()) or any(_in_range(pin.version, each) for each in events):
            fixed = tuple(event["fixed"] for each in events for event in each if "fixed" in event)
            yield Finding(pin.name, pin.version, str(record.get("id", "?")), fixed)


def _in_range(version: str, events: Sequence[Mapping[str, str]]) -> bool:
    """Whether a version is affected: events in order of version switch that on and off."""
    try:
        own = Version(version)
        affected = False
        for event in sorted(events, key=lambda each: _place(next(iter(each.values())))):
            [(kind, at)] = event.items()
            here = _place(at)
            if (kind == "introduced" and here <= own) or (kind == "fixed" and here <= own):
                affected = kind == "introduced"
            elif kind == "last_affected" and here < own:
                affected = False
    except InvalidVersion:
        return True  # nobody can say that it is not
    return affected


def _place(version: str) -> Version:
    return Version("0.dev0" if version == "0" else version)


def show(report: Report) -> str:
    lines = [
        f"{one.name} {one.version}: {one.id}, fixed in {', '.join(one.fixed_in) or '?'}" for one in report.findings
    ]
    if report.missing:
        count = "nothing was audited" if not report.audited else f"{len(report.missing)} packages were not audited"
        lines.append(f"{count}: {report.source} cannot be reached, or does not know them; this is no all-clear")
    lines.append(f"{report.audited} packages audited by {report.source}, {len(report.findings)} vulnerabilities known")
    return "\n".join(lines)

"""Bills of materials, the audit of what is locked, and what an image says of where it came from; without a network."""

from __future__ import annotations

import json
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tether_images import provenance
from tether_supply import audit, sbom
from tether_supply.lock import LockError, Pin, files, pins


def test_everything_that_is_locked_is_pinned_by_hash_and_services_take_a_part_of_it() -> None:
    known = {(pin.name, pin.version) for pin in pins(files()["all"])}
    assert set(files()) >= {"all", "agent", "backend", "collector", "router"}
    for name, path in files().items():
        found = pins(path)
        assert all(pin.hashes for pin in found), name
        assert {(pin.name, pin.version) for pin in found} <= known, name


def test_a_requirement_without_a_pin_or_a_hash_is_refused(tmp_path: Path) -> None:
    loose, bare = tmp_path / "loose.txt", tmp_path / "bare.txt"
    loose.write_text("nats-py>=2\n")
    bare.write_text("nats-py==2.0\n")
    with pytest.raises(LockError, match="must pin a version"):
        pins(loose)
    with pytest.raises(LockError, match="nats-py has no hash"):
        pins(bare)


def test_a_bill_of_materials_is_valid_complete_and_the_same_every_time(tmp_path: Path) -> None:
    path = files()["collector"]
    first = sbom._write("collector", path, tmp_path / "one.json").read_bytes()
    assert sbom._write("collector", path, tmp_path / "two.json").read_bytes() == first
    bill = json.loads(first)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "tether"
    listed = {(one["name"].lower().replace("_", "-"), one["version"]) for one in bill["components"]}
    assert listed == {(pin.name, pin.version) for pin in pins(path)}
    assert all(one["externalReferences"][0]["hashes"] for one in bill["components"])


def test_a_bill_that_is_not_valid_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [{"name": 7}]}')
    with pytest.raises(sbom.SbomError, match="no valid CycloneDX"):
        sbom.validate(path)


def record(package: str, *, events: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    affected = {"package": {"ecosystem": "PyPI", "name": package}, "ranges": [{"type": "ECOSYSTEM", "events": events}]}
    return {"id": "PYSEC-2026-1", "affected": [affected], **more}


def database(tmp_path: Path, *records: dict[str, Any]) -> Path:
    path = tmp_path / "all.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number, one in enumerate(records):
            archive.writestr(f"{number}.json", json.dumps(one))
    return path


PINS = [Pin("some-package", "1.4.0", ("sha256:0",))]


@pytest.mark.parametrize(
    ("events", "known"),
    [
        ([{"introduced": "0"}, {"fixed": "1.4.1"}], True),
        ([{"introduced": "0"}, {"fixed": "1.4.0"}], False),
        ([{"introduced": "1.5"}], False),
        ([{"introduced": "0"}, {"fixed": "1.0"}, {"introduced": "1.3"}, {"fixed": "2.0"}], True),
        ([{"introduced": "0"}, {"last_affected": "1.3.9"}], False),
        ([{"introduced": "0"}, {"last_affected": "1.4.0"}], True),
    ],
)
def test_a_database_that_was_fetched_before_says_what_is_affected(
    tmp_path: Path, events: list[dict[str, str]], known: bool
) -> None:
    report = audit.by_database(PINS, database(tmp_path, record("Some_Package", events=events), record("x", events=[])))
    assert [one.id for one in report.findings] == (["PYSEC-2026-1"] if known else [])
    assert report.code == (audit.FOUND if known else 0)
    assert "1 packages audited" in audit.show(report)


def test_what_was_withdrawn_or_is_of_another_ecosystem_is_no_finding(tmp_path: Path) -> None:
    events = [{"introduced": "0"}]
    withdrawn = record("some-package", events=events, withdrawn="2026-01-01T00:00:00Z")
    other = record("some-package", events=events)
    other["affected"][0]["package"]["ecosystem"] = "npm"
    assert audit.by_database(PINS, database(tmp_path, withdrawn, other)).findings == ()


def test_an_empty_database_is_no_all_clear(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no records"):
        audit.by_database(PINS, database(tmp_path))


def test_packages_that_a_service_does_not_know_are_no_all_clear() -> None:
    skipped = {"name": "a", "skip_reason": "Dependency not found on PyPI and could not be audited: a (1)"}
    fine = {"name": "b", "version": "1", "vulns": []}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
    assert audit.read_report({"dependencies": [fine]}, "pypi").code == 0
    part = audit.read_report({"dependencies": [fine, skipped]}, "pypi")
    assert part.code == audit.NOT_AUDITED
    assert "1 packages were not audited" in audit.show(part)
    assert audit.read_report({"dependencies": [fine, skipped, bad]}, "pypi").code == audit.FOUND
    assert "nothing was audited" in audit.show(audit.read_report({"dependencies": [skipped]}, "pypi"))
    with pytest.raises(ValueError, match="no report"):
        audit.read_report({}, "pypi")


def test_an_image_says_which_commit_lock_and_base_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = provenance.materials("collector", "python:3.13-slim", "ab" * 32)
    by_uri = {one["uri"]: one.get("digest", {}) for one in resolved}
    lock = Path(__file__).parents[2] / "deploy" / "requirements" / "collector.txt"
    assert by_uri["file:deploy/requirements/collector.txt"]["sha256"] == provenance.sha256_of(lock)
    assert by_uri["docker:python:3.13-slim"] == {"sha256": "ab" * 32}
    assert "file:deploy/Dockerfile" in by_uri
    commit = resolved[0]
    assert len(commit["digest"]["gitCommit"]) == 40 or commit["annotations"] == {"commit": "unknown"}
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    made = provenance.statement("tether-sandbox:1", "cd" * 32, "collector", {"base": "b"}, resolved, (at, at))
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert made["subject"] == [{"name": "tether-sandbox:1", "digest": {"sha256": "cd" * 32}}]
    assert made["predicateType"] == "https://slsa.dev/provenance/v1"
    definition = made["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"service": "collector", "base": "b"}
    assert definition["resolvedDependencies"] == resolved
    assert made["predicate"]["runDetails"]["metadata"]["startedOn"] == "2026-01-02T03:04:05+00:00"
    monkeypatch.setattr(provenance, "_git", lambda *_: None)
    assert provenance.source()["annotations"] == {"commit": "unknown"}

"""The rules by which an execution's events are redacted: `redaction.json` beside its spool, mode 0600.

    launch ── settings' patterns, digests of the secrets that the CLI gets ─▶ redaction.json ─▶ keeper ─▶ spool
    replay ── redaction.json ─▶ the same events, whatever the settings and keys are by then

Written, and on the medium, before the keeper is: no output is ever without its rules. The patterns are those of the
first launch; a further process of the execution adds the secrets that it is given. Where the file is missing (an
execution of a version that had none) or damaged the built-in patterns stand in: redaction changes no ordinals, so such
a replay still continues the log.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from tether.secret_patterns import BUILTIN, Pattern, parse
from tether.service import write_whole
from tether_collector.config import CollectorSettings
from tether_collector.core.redaction import LITERAL_CHARS_MIN, LITERALS_MAX, Literal, Rules
from tether_collector.spool_inputs import REDACTION

SALT_BYTES: Final = 16
_log = structlog.get_logger("tether.collector")


def patterns(settings: CollectorSettings) -> tuple[Pattern, ...]:
    """Those of the settings, which were checked, before the built-in ones."""
    own = [parse(name, source) for name, sources in settings.collector_redact.items() for source in sources]
    return (*own, *(BUILTIN if settings.collector_redact_builtin else ()))


def note(folder: Path, settings: CollectorSettings, given: Mapping[str, str]) -> Rules:
    """Before a launch in this folder: its rules are on the medium when this returns. `given`: the secrets that the CLI
    gets, by name; none of them is written. Raises OSError."""
    known = _read(folder)
    rules = Rules(patterns(settings)) if known is None else known
    salt = secrets.token_hex(SALT_BYTES)
    fresh = [
        Literal.of(name, value, salt)
        for name, value in sorted(given.items())
        if len(value) >= LITERAL_CHARS_MIN and not rules.knows(value)
    ][:LITERALS_MAX]
    if known is None or fresh:
        rules = rules.with_literals(fresh)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder / REDACTION, json.dumps(rules.dump(), separators=(",", ":")).encode())
    return rules


def load(folder: Path) -> Rules:
    """For a replay."""
    return _read(folder) or Rules(BUILTIN)


def _read(folder: Path) -> Rules | None:
    try:
        return Rules.load(json.loads((folder / REDACTION).read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        _log.error("redaction_rules_damaged", folder=str(folder))
        return None

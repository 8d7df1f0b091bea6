"""The collector's journal: what it has promised, on disk before it acts. SQLite of the standard library.

    executions   one row per start that was accepted; written before the claim, so a claim in the log without a row
                 here was never spawned by this volume's collectors and never will be
    controls     one row per control that was accepted: its payload's digest, and the receipt as it stands
    tokens       the highest authority token seen per conversation and kind; lower ones are refused
    ends         where in the log each end was stored, as long as it is looked after (see `review.py`)
    drains       one row per drain that was ordered, its whole state (`core.draining`); the latest is gone on with
    boots        when each boot of the sandbox was first seen (the idle clock of one that never ran anything), and the
                 revision of the checkpoint's reference that was there then: a later one is of another sandbox's
    gaps         ended executions whose final snapshot is not to be had, and why; outlives the execution's row

Every write is one transaction with `synchronous=FULL`: it is on the medium when the call returns (some 0.5 ms; it is
made on the loop's thread on purpose, so that nothing can come between a decision and its record). Ended rows are
kept for the terminal retention and then deleted by `forget`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from tether.checkpoint import DrainedExecution
from tether.control import ControlReply, ControlRequest, StartCommand
from tether.errors import Problem
from tether.events import GapReason, ReceiptStatus
from tether.ids import ExecutionTarget
from tether.sandbox import ExecutionSummary
from tether_collector.core.draining import Draining
from tether_collector.core.review import End

DRAINS_KEPT: Final = 8  # as many as there are references
BOOTS_KEPT_MS: Final = 7 * 24 * 3600 * 1000
SCHEMA_VERSION: Final = 1
CACHE_KIB: Final = 256  # of pages; SQLite's own 2 MiB would fill with rows that nobody reads again
Phase = Literal["journaled", "claimed", "spawned", "ended"]

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS executions (
    execution TEXT PRIMARY KEY, conversation TEXT NOT NULL, control TEXT NOT NULL, digest TEXT NOT NULL,
    command TEXT NOT NULL, target TEXT NOT NULL, nonce TEXT NOT NULL, claim BLOB NOT NULL, phase TEXT NOT NULL,
    created_at INTEGER NOT NULL, ended_at INTEGER, summary TEXT
) STRICT;
CREATE INDEX IF NOT EXISTS executions_ended ON executions (ended_at, execution) WHERE phase='ended';
CREATE TABLE IF NOT EXISTS controls (
    control TEXT PRIMARY KEY, execution TEXT NOT NULL, verb TEXT NOT NULL, digest TEXT NOT NULL,
    payload TEXT NOT NULL, status TEXT NOT NULL, problem TEXT, at INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS controls_execution ON controls (execution);
CREATE TABLE IF NOT EXISTS tokens (
    conversation TEXT NOT NULL, kind TEXT NOT NULL, token INTEGER NOT NULL, PRIMARY KEY (conversation, kind)
) STRICT;
CREATE TABLE IF NOT EXISTS ends (
    execution TEXT PRIMARY KEY, ordinal INTEGER NOT NULL, sequence INTEGER NOT NULL, at INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS gaps (
    execution TEXT PRIMARY KEY, reason TEXT NOT NULL, summary TEXT NOT NULL, ended_at INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS drains (
    drain TEXT PRIMARY KEY, control TEXT NOT NULL, state TEXT NOT NULL, at INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS boots (boot TEXT PRIMARY KEY, at INTEGER NOT NULL, reference INTEGER) STRICT;
"""


class JournalError(Exception):
    """The journal cannot be opened or is of a newer version: the collector must not start over it."""


@dataclass(frozen=True, slots=True)
class Start:
    """An accepted start. `claim`: the exact bytes of the claim's frame, so that it is sent again unchanged.
    `target` has the boot id and process generation; `digest` is the start request's."""

    execution: str
    conversation: str
    control: str
    digest: str
    command: StartCommand
    target: ExecutionTarget
    nonce: str
    claim: bytes
    phase: Phase
    created_at: int
    ended_at: int | None = None
    summary: ExecutionSummary | None = None


@dataclass(frozen=True, slots=True)
class OfConversation:
    """What is known of one conversation: its executions, those of them whose end is not in the log yet, and the agents'
    own sessions."""

    executions: tuple[str, ...]
    unended: tuple[str, ...]
    sessions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Control:
    """An accepted control and its receipt. `payload` as it was asked for."""

    control: str
    execution: str
    verb: str
    digest: str
    payload: dict[str, Any]
    status: ReceiptStatus
    problem: Problem | None
    at: int

    def reply(self, target: ExecutionTarget | None = None, result: dict[str, Any] | None = None) -> ControlReply:
        return ControlReply(
            control=self.control,
            verb=self.verb,
            status=self.status,
            problem=self.problem,
            target=target,
            result=result,
        )


def knows_boot(path: Path, boot: str) -> bool:
    """A collector of this boot has served with the journal of this path. False too where it cannot be read, or is of a
    version without boots: whoever opens it then says so."""
    try:
        with closing(sqlite3.connect(path)) as db:
            return db.execute("SELECT 1 FROM boots WHERE boot=?", (boot,)).fetchone() is not None
    except sqlite3.Error:
        return False


class Journal:
    """One open journal. Not for use by two collectors: the workspace's lock sees to that."""

    def __init__(self, path: Path) -> None:
        """Raises JournalError."""
        self.gaps_version = 0  # grows with every change of them, so that a copy is known to be old
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise JournalError(f"{path} cannot be opened: {error}") from error
        try:
            self._prepare(path)
        except sqlite3.Error as error:
            self.close()
            raise JournalError(f"{path} cannot be opened: {error}") from error
        except JournalError:
            self.close()
            raise

    def _prepare(self, path: Path) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        self._db.execute("PRAGMA secure_delete=ON")  # what was deleted is not in the file's free pages
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise JournalError(f"{path} is of version {version}, this collector knows {SCHEMA_VERSION}")
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # --- executions ---

    def add_start(self, start: Start, request: ControlRequest) -> None:
        """The start and its control, at once. Raises sqlite3.IntegrityError where the execution is known."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO executions VALUES (?,?,?,?,?,?,?,?,?,?,NULL,NULL)",
                (
                    start.execution,
                    start.conversation,
                    start.control,
                    start.digest,
                    start.command.model_dump_json(),
                    start.target.model_dump_json(),
                    start.nonce,
                    start.claim,
                    start.phase,
                    start.created_at,
                ),
            )
            db.execute(
                "INSERT INTO controls VALUES (?,?,?,?,?,'accepted',NULL,?)",
                (request.control, start.execution, "start", request.digest, "{}", start.created_at),
            )

    def start(self, execution: str) -> Start | None:
        row = self._db.execute("SELECT * FROM executions WHERE execution=?", (execution,)).fetchone()
        return None if row is None else _start(row)

    def unended(self) -> list[Start]:
        """Every start whose end is not yet in the log, oldest first."""
        rows = self._db.execute("SELECT * FROM executions WHERE phase!='ended' ORDER BY created_at, rowid").fetchall()
        return [_start(row) for row in rows]

    def ended_of(self, conversation: str) -> list[str]:
        """The conversation's executions that have ended, the latest first, as far as they are remembered."""
        rows = self._db.execute(
            "SELECT execution FROM executions WHERE conversation=? AND phase='ended' ORDER BY ended_at DESC LIMIT 16",
            (conversation,),
        ).fetchall()
        return [row[0] for row in rows]

    def ended(self, limit: int) -> list[ExecutionSummary]:
        """Of the latest that ended; not their commands, each of which may hold half a megabyte of prompt."""
        rows = self._db.execute(
            "SELECT summary FROM executions WHERE phase='ended' AND summary IS NOT NULL ORDER BY ended_at DESC LIMIT ?",
            (limit,),
        ).fetchall()
        return [ExecutionSummary.model_validate_json(row[0]) for row in rows]

    def set_phase(self, execution: str, phase: Phase) -> None:
        with self._transaction() as db:
            db.execute("UPDATE executions SET phase=? WHERE execution=?", (phase, execution))

    def set_process(self, execution: str, target: ExecutionTarget, nonce: str) -> None:
        """The execution goes on in the process that `target` names; nothing of it is spawned yet."""
        with self._transaction() as db:
            db.execute(
                "UPDATE executions SET target=?, nonce=?, phase='claimed' WHERE execution=?",
                (target.model_dump_json(), nonce, execution),
            )

    def set_ended(self, execution: str, at: int, summary: ExecutionSummary | None, end: End | None = None) -> None:
        """`at` (unix ms) is the end's own time. `summary` is what discovery says from now on; None for a start that
        was refused: it never was an execution. `end`: where its own end is stored, to be looked after."""
        with self._transaction() as db:
            if end is not None:
                db.execute(
                    "INSERT INTO ends VALUES (?,?,?,?) ON CONFLICT DO UPDATE SET ordinal=excluded.ordinal, "
                    "sequence=excluded.sequence",
                    (execution, end.ordinal, end.sequence, end.at),
                )
            db.execute(
                "UPDATE executions SET phase='ended', ended_at=?, summary=? WHERE execution=?",
                (at, None if summary is None else summary.model_dump_json(), execution),
            )

    def ends(self) -> list[End]:
        """The ends that are looked after, the latest first."""
        rows = self._db.execute("SELECT execution, ordinal, sequence, at FROM ends ORDER BY at DESC").fetchall()
        return [End(*row) for row in rows]

    def forget_end(self, execution: str) -> None:
        """Nothing looks after this end any more: it was deleted from the log on purpose."""
        with self._transaction() as db:
            db.execute("DELETE FROM ends WHERE execution=?", (execution,))

    # --- gaps ---

    def add_gap(self, summary: ExecutionSummary, reason: GapReason, ended_at: int) -> None:
        """The final snapshot of this execution is not to be had. `ended_at` (unix ms) is the end's own time."""
        self.gaps_version += 1
        with self._transaction() as db:
            data = summary.model_copy(update={"gap": reason}).model_dump_json()
            db.execute(
                "INSERT OR REPLACE INTO gaps VALUES (?,?,?,?)", (summary.target.execution, reason, data, ended_at)
            )

    def drop_gap(self, execution: str) -> None:
        """It is to be had after all."""
        self.gaps_version += 1
        with self._transaction() as db:
            db.execute("DELETE FROM gaps WHERE execution=?", (execution,))

    def gap(self, execution: str) -> tuple[ExecutionSummary, int] | None:
        """Why its final snapshot is not to be had, and the time of its end; None where nothing is known of a gap."""
        row = self._db.execute("SELECT summary, ended_at FROM gaps WHERE execution=?", (execution,)).fetchone()
        return None if row is None else (ExecutionSummary.model_validate_json(row[0]), int(row[1]))

    def gaps(self) -> list[tuple[ExecutionSummary, int]]:
        """With the time of each end, the latest first."""
        rows = self._db.execute("SELECT summary, ended_at FROM gaps ORDER BY ended_at DESC, execution").fetchall()
        return [(ExecutionSummary.model_validate_json(row[0]), int(row[1])) for row in rows]

    def trim_gaps(self, ended_before: int, keep: int) -> int:
        """Forget those of ends before this time (unix ms), and all but the `keep` latest; how many went."""
        self.gaps_version += 1
        with self._transaction() as db:
            return db.execute(
                "DELETE FROM gaps WHERE ended_at<? OR execution NOT IN "
                "(SELECT execution FROM gaps ORDER BY ended_at DESC, execution LIMIT ?)",
                (ended_before, keep),
            ).rowcount

    # --- controls ---

    def control(self, control: str) -> Control | None:
        row = self._db.execute("SELECT * FROM controls WHERE control=?", (control,)).fetchone()
        return None if row is None else _control(row)

    def controls_of(self, execution: str) -> list[Control]:
        rows = self._db.execute("SELECT * FROM controls WHERE execution=? ORDER BY at, rowid", (execution,)).fetchall()
        return [_control(row) for row in rows]

    def add_control(self, request: ControlRequest, execution: str, at: int, *, token: tuple[str, str, int]) -> Control:
        """Accept a control; `token` (conversation, kind, token) is remembered with it."""
        payload = json.dumps(request.payload, separators=(",", ":"))
        with self._transaction() as db:
            db.execute(
                "INSERT INTO controls VALUES (?,?,?,?,?,'accepted',NULL,?)",
                (request.control, execution, request.verb, request.digest, payload, at),
            )
            self._raise_token(db, *token)
        return Control(request.control, execution, request.verb, request.digest, request.payload, "accepted", None, at)

    def set_receipt(self, control: str, status: ReceiptStatus, problem: Problem | None) -> None:
        with self._transaction() as db:
            db.execute(
                "UPDATE controls SET status=?, problem=? WHERE control=?",
                (status, None if problem is None else problem.model_dump_json(), control),
            )

    # --- drains ---

    def add_drain(
        self, state: Draining, request: ControlRequest | None = None, token: tuple[str, str, int] = ("", "", 0)
    ) -> None:
        """A drain is accepted: with its control, where one asked for it. Older ones than DRAINS_KEPT are forgotten."""
        control = "" if request is None else request.control
        with self._transaction() as db:
            db.execute("INSERT INTO drains VALUES (?,?,?,?)", (state.drain, control, state.model_dump_json(), state.at))
            if request is not None:
                payload = json.dumps(request.payload, separators=(",", ":"))
                db.execute(
                    "INSERT INTO controls VALUES (?,'',?,?,?,'accepted',NULL,?)",
                    (control, request.verb, request.digest, payload, state.at),
                )
                self._raise_token(db, *token)
            old = "SELECT drain FROM drains ORDER BY at DESC, rowid DESC LIMIT -1 OFFSET ?"
            db.execute(
                f"DELETE FROM controls WHERE control IN (SELECT control FROM drains WHERE drain IN ({old}))",
                (DRAINS_KEPT,),
            )
            db.execute(f"DELETE FROM drains WHERE drain IN ({old})", (DRAINS_KEPT,))

    def save_drain(self, state: Draining) -> None:
        """How it stands; the receipt of its control settles with its end."""
        with self._transaction() as db:
            db.execute("UPDATE drains SET state=? WHERE drain=?", (state.model_dump_json(), state.drain))
            if state.over:
                db.execute(
                    "UPDATE controls SET status='settled' "
                    "WHERE control!='' AND control=(SELECT control FROM drains WHERE drain=?)",
                    (state.drain,),
                )

    def drain(self, drain: str | None = None) -> Draining | None:
        """The one of this id; the latest without."""
        if drain is None:
            row = self._db.execute("SELECT state FROM drains ORDER BY at DESC, rowid DESC LIMIT 1").fetchone()
        else:
            row = self._db.execute("SELECT state FROM drains WHERE drain=?", (drain,)).fetchone()
        return None if row is None else Draining.model_validate_json(row[0])

    # --- boots ---

    def boot_seen(self, boot: str, at: int) -> int:
        """When this boot was first seen (unix ms): `at` where it is now."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO boots VALUES (?,?,NULL)", (boot, at))
            db.execute("DELETE FROM boots WHERE boot!=? AND at<?", (boot, at - BOOTS_KEPT_MS))
            return int(db.execute("SELECT at FROM boots WHERE boot=?", (boot,)).fetchone()[0])

    def reference_seen(self, boot: str, revision: int | None = None) -> int | None:
        """The revision of the reference (0: none) that this boot began with; noted where it is given and not known."""
        if revision is not None:
            with self._transaction() as db:
                db.execute("UPDATE boots SET reference=? WHERE boot=? AND reference IS NULL", (revision, boot))
        row = self._db.execute("SELECT reference FROM boots WHERE boot=?", (boot,)).fetchone()
        return None if row is None or row[0] is None else int(row[0])

    def last_end(self) -> int | None:
        """When the last execution ended (unix ms); None where none is known."""
        row = self._db.execute("SELECT max(ended_at) FROM executions WHERE phase='ended'").fetchone()
        return None if row[0] is None else int(row[0])

    def generations(self) -> dict[str, int]:
        """Conversation → the highest execution generation that is known of it."""
        rows = self._db.execute(
            "SELECT conversation, max(json_extract(target, '$.execution_generation')) FROM executions "
            "GROUP BY conversation"
        ).fetchall()
        return {row[0]: int(row[1]) for row in rows}

    # --- tokens ---

    def token(self, conversation: str, kind: str) -> int:
        """The highest seen, 0 where there was none."""
        row = self._db.execute(
            "SELECT token FROM tokens WHERE conversation=? AND kind=?", (conversation, kind)
        ).fetchone()
        return 0 if row is None else int(row[0])

    @staticmethod
    def _raise_token(db: sqlite3.Connection, conversation: str, kind: str, token: int) -> None:
        if token > 0:
            db.execute(
                "INSERT INTO tokens VALUES (?,?,?) ON CONFLICT DO UPDATE SET token=max(token, excluded.token)",
                (conversation, kind, token),
            )

    def ended_at(self) -> dict[str, int]:
        """Every ended execution and when it ended (unix ms)."""
        rows = self._db.execute("SELECT execution, ended_at FROM executions WHERE phase='ended'").fetchall()
        return {row[0]: int(row[1]) for row in rows}

    def forget(self, executions: Sequence[str]) -> None:
        """Delete what is known of these ended executions."""
        with self._transaction() as db:
            for name in executions:
                db.execute("DELETE FROM controls WHERE execution=?", (name,))
                db.execute("DELETE FROM ends WHERE execution=?", (name,))
                db.execute("DELETE FROM executions WHERE execution=? AND phase='ended'", (name,))

    # --- deleting ---

    def of_conversation(self, conversation: str) -> OfConversation:
        rows = self._db.execute(
            "SELECT execution, phase, target, command, summary FROM executions WHERE conversation=? ORDER BY rowid",
            (conversation,),
        ).fetchall()
        sessions: dict[str, None] = {}
        for _, _, target, command, summary in rows:
            told = None if summary is None else json.loads(summary).get("target", {}).get("native_session")
            for name in (json.loads(target).get("native_session"), json.loads(command).get("resume_session"), told):
                if isinstance(name, str) and name:
                    sessions[name] = None
        gone = [one.target.execution for one, _ in self.gaps() if one.target.conversation == conversation]
        return OfConversation(
            executions=tuple(dict.fromkeys([*(row[0] for row in rows), *gone])),
            unended=tuple(row[0] for row in rows if row[1] != "ended"),
            sessions=tuple(sessions),
        )

    def forget_conversation(self, conversation: str) -> None:
        """Delete every row of the conversation, drains that tell of it included, and write the file anew, so that
        nothing of them is left in it."""
        known = self.of_conversation(conversation)
        drains = self._db.execute("SELECT drain, control, state FROM drains").fetchall()
        self.gaps_version += 1
        with self._transaction() as db:
            for name in known.executions:
                for table in ("controls", "ends", "gaps", "executions"):
                    db.execute(f"DELETE FROM {table} WHERE execution=?", (name,))
            db.execute("DELETE FROM tokens WHERE conversation=?", (conversation,))
            for drain, control, state in drains:
                if any(json.dumps(name) in state for name in (conversation, *known.executions)):
                    db.execute("DELETE FROM drains WHERE drain=?", (drain,))
                    db.execute("DELETE FROM controls WHERE control=? AND control!=''", (control,))
        self._db.execute("VACUUM")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def copy_journal(path: Path, to: Path, ended: Sequence[DrainedExecution], at: int) -> None:
    """A consistent copy of the journal at `path`, which may be open and written meanwhile, as it is to be found by who
    goes on from a checkpoint elsewhere: nothing runs there, and there are no spools, so `ended` have ended (`at`, unix
    ms), no end can be put back, and no drain is under way. Raises sqlite3.Error, OSError."""
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(to, isolation_level=None)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")
        copy.execute("PRAGMA synchronous=FULL")
        copy.execute("BEGIN IMMEDIATE")
        for one in ended:
            summary = ExecutionSummary(target=one.target, state="ended", last_ordinal=one.last_ordinal)
            copy.execute(
                "UPDATE executions SET phase='ended', ended_at=?, summary=? WHERE execution=? AND phase!='ended'",
                (at, summary.model_dump_json(), one.target.execution),
            )
        copy.execute("UPDATE executions SET phase='ended', ended_at=? WHERE phase!='ended'", (at,))
        for table in ("ends", "drains", "boots"):
            copy.execute(f"DELETE FROM {table}")
        copy.execute("COMMIT")


def _start(row: tuple[Any, ...]) -> Start:
    execution, conversation, control, digest, command, target, nonce, claim, phase, created_at, ended_at, summary = row
    return Start(
        execution=execution,
        conversation=conversation,
        control=control,
        digest=digest,
        command=StartCommand.model_validate_json(command),
        target=ExecutionTarget.model_validate_json(target),
        nonce=nonce,
        claim=claim,
        phase=cast(Phase, phase),
        created_at=created_at,
        ended_at=ended_at,
        summary=None if summary is None else ExecutionSummary.model_validate_json(summary),
    )


def _control(row: tuple[Any, ...]) -> Control:
    control, execution, verb, digest, payload, status, problem, at = row
    return Control(
        control=control,
        execution=execution,
        verb=verb,
        digest=digest,
        payload=json.loads(payload),
        status=cast(ReceiptStatus, status),
        problem=None if problem is None else Problem.model_validate_json(problem),
        at=at,
    )

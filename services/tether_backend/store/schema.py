"""The projection's tables. Everything here can be rebuilt from the log, except `usage`, which billing reads: it is
keyed by (execution, turn), so that a rebuild adds nothing to it.

    meta            the database's own id
    projections     number of the last committed batch per tenant and shard
    conversations   one row each; `next_place` orders its entries
    entries         the conversation-level events, each id once; `place` is their order in the log
    responses       folded from entries
    executions      the folded state without its items; `applied` is the ordinal up to which it is
    items           text, tools, interactions, gaps, raw lines: one row per item, replaced as it grows
    receipts        controls and what became of them
    recoveries      executions whose rows are to be repaired (`core.recovery`); `note`: repaired, and not yet told
    usage           per turn

The indexes of `items` cover only the few kinds that are asked for by kind: text and tools, which are nearly all rows,
cost no more than their primary key. A query uses them only where it names the kind literally (`history.KINDS`).

No stream sequence is stored: position in the log belongs to the log. Times are unix milliseconds.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import JSON, BigInteger, Column, Float, Index, Integer, MetaData, String, Table, Text, text

METADATA: Final = MetaData()
_TOKEN: Final = 64


def _tenant() -> Column[str]:
    return Column("tenant", String(_TOKEN), primary_key=True)


meta: Final = Table(
    "meta",
    METADATA,
    Column("key", String(_TOKEN), primary_key=True),
    Column("value", Text, nullable=False),
)

projections: Final = Table(
    "projections",
    METADATA,
    _tenant(),
    Column("shard", Integer, primary_key=True),
    Column("number", BigInteger, nullable=False),
)

conversations: Final = Table(
    "conversations",
    METADATA,
    _tenant(),
    Column("conversation", String(_TOKEN), primary_key=True),
    Column("workspace", String(_TOKEN), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("next_place", BigInteger, nullable=False),
    Column("messages", BigInteger, nullable=False),
    Index("conversations_recent", "tenant", "updated_at", "conversation"),
)

entries: Final = Table(
    "entries",
    METADATA,
    _tenant(),
    Column("conversation", String(_TOKEN), primary_key=True),
    Column("id", String(256), primary_key=True),
    Column("place", BigInteger, nullable=False),
    Column("type", String(_TOKEN), nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("body", JSON, nullable=False),
    Index("entries_place", "tenant", "conversation", "place"),
)

responses: Final = Table(
    "responses",
    METADATA,
    _tenant(),
    Column("conversation", String(_TOKEN), primary_key=True),
    Column("response", String(_TOKEN * 2), primary_key=True),
    Column("request", String(_TOKEN), nullable=False),
    Column("place", BigInteger, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("execution", String(_TOKEN)),
    Column("agent", String(_TOKEN)),
    Column("at", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("error", JSON),
    Column("superseded_by", String(_TOKEN)),
    Index("responses_place", "tenant", "conversation", "place"),
    Index("responses_execution", "tenant", "execution"),
)

_RUNS: Final = text("phase <> 'ended'")
executions: Final = Table(
    "executions",
    METADATA,
    _tenant(),
    Column("execution", String(_TOKEN), primary_key=True),
    Column("conversation", String(_TOKEN), nullable=False),
    Column("workspace", String(_TOKEN), nullable=False),
    Column("applied", BigInteger, nullable=False),
    Column("phase", String(16), nullable=False),
    Column("items", Integer, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("state", JSON, nullable=False),
    Index("executions_conversation", "tenant", "conversation"),
    Index("executions_recent", "tenant", "updated_at", "execution"),
    Index("executions_open", "tenant", "execution", sqlite_where=_RUNS, postgresql_where=_RUNS),
)

_ASKED: Final = text("kind = 'interaction'")
_TOLD: Final = text("kind = 'interaction' OR kind = 'gap'")
items: Final = Table(
    "items",
    METADATA,
    _tenant(),
    Column("execution", String(_TOKEN), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("conversation", String(_TOKEN), nullable=False),
    Column("item", Text, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("state", JSON, nullable=False),
    Index("items_asked", "tenant", "conversation", "status", sqlite_where=_ASKED, postgresql_where=_ASKED),
    Index("items_told", "tenant", "execution", "kind", "position", sqlite_where=_TOLD, postgresql_where=_TOLD),
)

receipts: Final = Table(
    "receipts",
    METADATA,
    _tenant(),
    Column("conversation", String(_TOKEN), primary_key=True),
    Column("control", String(_TOKEN), primary_key=True),
    Column("execution", String(_TOKEN), nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("body", JSON, nullable=False),
    Index("receipts_control", "tenant", "control"),
)

recoveries: Final = Table(
    "recoveries",
    METADATA,
    _tenant(),
    Column("execution", String(_TOKEN), primary_key=True),
    Column("conversation", String(_TOKEN), nullable=False),
    Column("workspace", String(_TOKEN), nullable=False),
    Column("mark", BigInteger, nullable=False),
    Column("why", String(16), nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("note", JSON(none_as_null=True)),
)

usage: Final = Table(
    "usage",
    METADATA,
    _tenant(),
    Column("execution", String(_TOKEN), primary_key=True),
    Column("turn", String(256), primary_key=True),
    Column("conversation", String(_TOKEN), nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cache_read_tokens", BigInteger, nullable=False),
    Column("cache_write_tokens", BigInteger, nullable=False),
    Column("cost_usd", Float),
    Column("model", String(256)),
    Index("usage_conversation", "tenant", "conversation"),
)

deletions: Final = Table(
    "deletions",
    METADATA,
    _tenant(),
    Column("conversation", String(_TOKEN), primary_key=True),
    Column("deletion", String(_TOKEN), nullable=False),
    Column("until", BigInteger, nullable=False),
    Column("at", BigInteger, nullable=False),
)

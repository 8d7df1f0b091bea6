"""The SDK: `Client` over HTTP (extra `client`) or NATS. What a reader gets is in `tether.client.items`."""

import logging

import structlog

from tether.client.client import Client
from tether.client.items import CaughtUp, ConversationItem, ExecutionItem, GapItem, Item, PositionChanged, SnapshotItem
from tether.client.nats import NatsCredentials
from tether.client.types import (
    Answer,
    Interaction,
    OnInteraction,
    Response,
    ResponseFailedError,
    Submission,
    resume_choices,
)

# A library writes nothing to its program's stdout: without a configuration of the program's own, what Tether logs goes
# to `logging`, whose warnings go to stderr.
if not structlog.is_configured():
    structlog.configure(
        processors=[structlog.processors.KeyValueRenderer(key_order=["event"])],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
    )

__all__ = [
    "Answer",
    "CaughtUp",
    "Client",
    "ConversationItem",
    "ExecutionItem",
    "GapItem",
    "Interaction",
    "Item",
    "NatsCredentials",
    "OnInteraction",
    "PositionChanged",
    "Response",
    "ResponseFailedError",
    "SnapshotItem",
    "Submission",
    "resume_choices",
]

"""The SDK: `Client` over HTTP (extra `client`) or NATS. What a reader gets is in `tether.client.items`."""

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
]

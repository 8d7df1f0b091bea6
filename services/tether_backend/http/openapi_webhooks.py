"""What `/openapi.json` says of the webhook outbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tether.api import WebhookDelivery, WebhookDeliveryList, WebhookEndpoint, WebhookList
from tether.errors import Code
from tether.ids import TOKEN_REMEDY
from tether_backend.http import openapi_examples as ex
from tether_backend.http import openapi_refusals as no
from tether_backend.http.openapi import Answer, Parameter, Refusal, Route

_DEAD: Final = WebhookDelivery(
    id="ntf_3808e78b1fa1fb76380ef3f1416f81cb",
    endpoint="chat",
    kind="interaction.requested",
    conversation=ex.CONVERSATION,
    execution=ex.EXECUTION,
    state="dead",
    attempts=11,
    created_at=ex.AT,
    due_at=ex.AT + 57_000_000,
    settled_at=ex.AT + 57_000_000,
    status=503,
    error="example.org answered 503",
)
_PENDING: Final = _DEAD.model_copy(update={"state": "pending", "attempts": 0, "settled_at": None})
_NO_NOTIFICATION: Final = Refusal.of(
    "no_notification", Code.NOT_FOUND, "notification: there is none of this endpoint and id"
)
_BAD_STATE: Final = Refusal.of(
    "bad_delivery_state",
    Code.INVALID,
    "query.state: must be one of pending, delivered or dead",
    field="query.state",
)
_BAD_ENDPOINT: Final = Refusal.of(
    "bad_endpoint",
    Code.INVALID,
    f"path.endpoint: {TOKEN_REMEDY}",
    field="path.endpoint",
)
_ENDPOINT: Final = Parameter("The endpoint's name in the webhooks file.", "chat")

WEBHOOK_ROUTES: Final[Mapping[str, Route]] = {
    "GET /v1/webhooks": Route(
        "Operations",
        "listWebhooks",
        "List webhook endpoints",
        "Where notifications of this tenant go, as the backend was configured. Addresses are not shown.",
        {
            200: Answer(
                "All of them",
                WebhookList,
                {
                    "one": ex.json_of(
                        WebhookList(
                            endpoints=[
                                WebhookEndpoint(name="chat", host="example.org", kinds=["interaction.requested"])
                            ]
                        )
                    )
                },
            )
        },
        no.EDGE,
    ),
    "GET /v1/webhooks/deliveries": Route(
        "Operations",
        "listWebhookDeliveries",
        "List notifications",
        "The last written first: `pending` ones wait for their next attempt, `dead` ones had their last.",
        {
            200: Answer(
                "Those that match", WebhookDeliveryList, {"dead": ex.json_of(WebhookDeliveryList(deliveries=[_DEAD]))}
            )
        },
        (*no.EDGE, no.BAD_LIMIT, _BAD_STATE, no.NO_BUS),
        {
            "state": Parameter("Only those.", "dead"),
            "endpoint": _ENDPOINT,
            "limit": Parameter("At most so many entries.", 20),
        },
    ),
    "POST /v1/webhooks/deliveries/{endpoint}/{notification}/retry": Route(
        "Operations",
        "retryWebhookDelivery",
        "Put a notification back",
        "A dead one, or one that waits, is due at once; a delivered one stays delivered.",
        {200: Answer("As it is now", WebhookDelivery, {"due": ex.json_of(_PENDING)})},
        (*no.EDGE, _BAD_ENDPOINT, _NO_NOTIFICATION, no.NO_BUS),
        {"endpoint": _ENDPOINT, "notification": Parameter("Its id.", _DEAD.id)},
    ),
}

"""The AsyncAPI document: valid, complete against the topology, true about who uses what."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tether import subjects, topology
from tether.control import VERBS
from tether_schemas.asyncapi import document
from tether_schemas.asyncapi_parts import stream_specs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OFFICIAL = ROOT / "tests" / "golden" / "asyncapi" / "3.0.0.json"
Json = dict[str, Any]
ASYNCAPI: Final[Json] = json.loads(json.dumps(document()))
CHANNELS: Final[Json] = ASYNCAPI["channels"]

# Which channels a name of `tether.subjects` stands for, in the code of a role.
USES: Final = {
    "prompt": {"prompts"},
    "PROMPTS_STREAM": {"prompts"},
    "command": {"commands"},
    "COMMANDS_STREAM": {"commands"},
    "control": {"control"},
    "control_all": {"control"},
    **{name: {"controlReply"} for name in ("reply_base", "replies", "replies_all")},
    "agent": {
        *("agentSandboxes", "agentWorkspace", "agentStop"),
        *("agentDrain", "agentSuspend", "agentDelete", "agentDrainStatus", "agentResume", "agentForget"),
    },
    "history": {"history"},
    "histories": {"history"},
    "checkpoint_key": {"checkpoints"},
    "event": {"executionEvents", "conversationEvents"},
    "events_stream": {"executionEvents", "conversationEvents"},
    "conversation_events": {"executionEvents", "conversationEvents"},
    "conversation_live": {"liveExecutionEvents", "liveConversationEvents"},
    "blob": {"blobParts"},
    "blobs_stream": {"blobParts"},
    "quarantine": {"quarantine"},
    "quarantine_stream": {"quarantine"},
    "OWNERS": {"owners"},
    "owner_key": {"owners"},
    "REQUESTS": {"requests"},
    "request_key": {"requests"},
    "QUOTAS": {"tenantAllowances", "workspaceAllowances", "tenantPlaces", "allPlaces"},
    "prompt_rate_key": {"tenantAllowances", "workspaceAllowances"},
    "running_key": {"tenantPlaces", "allPlaces"},
    "CONVERSATIONS": {"conversations"},
    "conversation_key": {"conversations"},
    "DELETIONS": {"deletions"},
    "deletion_key": {"deletions"},
    "PROJECTIONS": {"projections"},
    "projection_key": {"projections"},
    "CHECKPOINTS": {"checkpoints"},
    "sandbox_key": {"sandboxes"},
    "registration_key": {"registrations"},
    "SANDBOXES": {"sandboxes", "registrations"},
    "LEASES": {"controlLeases", "projectorLeases", "webhookLeases"},
    "webhooks_lease_key": {"webhookLeases"},
    "NOTIFICATIONS": {"notifications"},
    "notification_key": {"notifications"},
    "webhook_start_key": {"webhookStarts"},
    "WEBHOOKS_DURABLE": {"executionEvents"},
    "lease_key": {"controlLeases"},
    "projector_lease_key": {"projectorLeases"},
    "projection_durable": {"executionEvents"},
    "ROUTER_DURABLE": {"prompts"},
    "AGENT_DURABLE": {"commands"},
}
PACKAGES: Final = {
    "backend": "services/tether_backend",
    "router": "services/tether_router",
    "agentService": "services/tether_agent",
    "collector": "services/tether_collector",
    "client": "contracts/tether/client",
}


def operations_of(role: str) -> Iterator[Json]:
    yield from (each for each in ASYNCAPI["operations"].values() if each["x-role"] == role)


def channel_of(operation: Json) -> str:
    return str(operation["channel"]["$ref"]).rpartition("/")[2]


def test_the_document_is_valid_by_asyncapis_own_schema() -> None:
    validator = Draft7Validator(json.loads(OFFICIAL.read_text()))
    assert [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(ASYNCAPI)] == []
    broken = {**ASYNCAPI, "operations": {"x": {"action": "shout", "channel": {"$ref": "#/channels/prompts"}}}}
    assert list(validator.iter_errors(broken)) != []


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_every_reference_leads_somewhere() -> None:
    for reference in set(references({name: ASYNCAPI[name] for name in ("channels", "operations", "components")})):
        file, _, pointer = reference.partition("#")
        if file:
            assert (DOCS / file).is_file(), reference
            continue
        if pointer.startswith("/$defs/"):
            continue  # of the schema that it stands in
        found: Any = ASYNCAPI
        for part in pointer.strip("/").split("/"):
            found = found[part]


def addresses() -> set[str]:
    return {each["address"] for each in CHANNELS.values() if each["address"] is not None}


def covered(pattern: str) -> bool:
    """Whether a channel's address lies in the pattern (`*`, `>`)."""
    prefix = pattern.partition(">")[0].partition("*")[0]
    return any(address.startswith(prefix) for address in addresses())


@pytest.mark.parametrize("spec", stream_specs(), ids=lambda spec: spec.name)
def test_every_stream_and_bucket_of_the_topology_is_told_with_its_facts(spec: topology.StreamSpec) -> None:
    name = spec.name.replace("XTENANT", "{tenant}")
    told = [each["x-jetstream"] for each in CHANNELS.values() if each.get("x-jetstream", {}).get("stream") == name]
    assert told, name
    for facts in told:
        assert facts["retention"] == spec.retention
        assert facts["subjects"] == [one.replace("XTENANT", "{tenant}") for one in spec.subjects]
        assert facts.get("maxAgeSeconds", 0) == spec.max_age_s
        assert ("republish" in facts) == (spec.republish is not None)
    for pattern in spec.subjects:
        assert covered(pattern.replace("XTENANT", "{tenant}")), pattern
    if spec.republish is not None:
        assert covered(spec.republish.destination.replace("XTENANT", "{tenant}"))


def test_every_durable_consumer_is_told_and_read_by_a_role() -> None:
    told = {
        (each["x-jetstream"]["stream"], consumer["durable"])
        for each in CHANNELS.values()
        for consumer in each.get("x-jetstream", {}).get("consumers", [])
    }
    wanted = {(each.stream, each.durable) for each in topology.base().consumers}
    wanted |= {("EVENTS_{tenant}", name) for name in ("projection-{database}-0", "webhooks", "NAME")}
    assert told == wanted
    read = {each["x-how"].get("consumer") for each in ASYNCAPI["operations"].values() if "x-how" in each}
    assert {durable for _, durable in wanted} <= read


def test_every_subject_and_bucket_of_the_subjects_module_has_a_channel() -> None:
    """A new name in `tether.subjects` must be sorted into USES, or be none of the wire."""
    tree = ast.parse(Path(subjects.__file__).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    names |= {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    no_wire = {"parse_event", "parse_prompt", "parse_command", "ANY_WORKSPACE", "PROMPTS_ALL", "COMMANDS_ALL"}
    no_wire.add("SUBJECTS_CACHED_MAX")
    assert names - no_wire == set(USES)
    assert set().union(*USES.values()) <= set(CHANNELS)
    buckets = {each["address"].split(".")[1] for each in CHANNELS.values() if str(each["address"]).startswith("$KV.")}
    wanted = {value for name, value in vars(subjects).items() if name.isupper() and str(value).startswith("tether_")}
    assert buckets == wanted


@pytest.mark.parametrize("role", sorted(PACKAGES))
def test_a_role_has_an_operation_for_every_subject_that_its_code_names(role: str) -> None:
    used: set[str] = set()
    for path in (ROOT / PACKAGES[role]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "subjects":
                used.add(node.attr)
    told = {channel_of(operation) for operation in operations_of(role)}
    missing = {name for name in used & set(USES) if not USES[name] & told}
    assert missing == set()
    assert len(used & set(USES)) > 3


def test_channels_and_operations_are_described_and_every_channel_is_used() -> None:
    for name, channel in CHANNELS.items():
        assert channel["title"] and channel["description"], name
        parts = {part[1:-1] for part in str(channel["address"]).split(".") if part.startswith("{")}
        assert parts == set(channel.get("parameters", {})), name
    used = {channel_of(each) for each in ASYNCAPI["operations"].values()}
    used |= {each["reply"]["channel"]["$ref"].rpartition("/")[2] for each in replying()}
    assert set(CHANNELS) - used == set()


def replying() -> list[Json]:
    return [each for each in ASYNCAPI["operations"].values() if "reply" in each]


def test_what_is_asked_is_answered_and_what_is_sent_is_received() -> None:
    for each in replying():
        other = "receive" if each["action"] == "send" else "send"
        assert any(channel_of(one) == channel_of(each) and one["action"] == other for one in replying()), (
            f"nobody does {other} on {channel_of(each)}"
        )
    by_channel: dict[str, set[str]] = {}
    for each in ASYNCAPI["operations"].values():
        by_channel.setdefault(channel_of(each), set()).add(each["action"])
    alone = {name for name, actions in by_channel.items() if actions != {"send", "receive"}}
    # The value of these leases tells people; the holder needs only compare-and-set.
    assert alone == {"projectorLeases", "webhookLeases"}


def test_the_verbs_of_controls_are_those_of_the_contract() -> None:
    assert ASYNCAPI["components"]["parameters"]["verb"]["enum"] == list(VERBS)


@pytest.mark.parametrize("name", sorted(ASYNCAPI["components"]["messages"]))
def test_a_messages_example_is_of_its_schema(name: str) -> None:
    message = ASYNCAPI["components"]["messages"][name]
    schema = message["payload"].get("schema", message["payload"])
    registry: Registry[Any] = Registry()
    for path in (DOCS / "schemas").glob("*.json"):
        contents = json.loads(path.read_text())
        resource = Resource.from_contents(contents, default_specification=DRAFT202012)
        registry = registry.with_resource(f"schemas/{path.name}", resource)
    validator = Draft202012Validator(schema, registry=registry)
    for example in message.get("examples", []):
        assert [error.message[:200] for error in validator.iter_errors(example["payload"])] == []
        assert set(message.get("headers", {}).get("required", [])) <= set(
            message.get("headers", {}).get("properties", [])
        )
    if message.get("examples") and schema.get("$ref") not in ("schemas/agent-sandboxes-request.json",):
        assert list(validator.iter_errors([])) != []  # a check that cannot fail proves nothing


def test_large_inputs_say_their_limit() -> None:
    prompts = CHANNELS["prompts"]["x-jetstream"]
    assert prompts["maxMessagesPerSubject"] and prompts["maxMessageBytes"] and prompts["discardNewPerSubject"]

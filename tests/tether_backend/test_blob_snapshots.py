"""A snapshot that is too large for a reply comes through the blob store, over HTTP and to the client on NATS."""

from __future__ import annotations

from pathlib import Path

from support_backend import Log, running_backend, text_delta
from tether import subjects
from tether.client.nats_records import Records
from tether.control import ControlReply, decode_request
from tether.fold import ExecutionFold
from tether.kv import Bucket
from tether.ports import Message
from tether.sandbox import CAN_SNAPSHOT, Registration
from tether.snapshot import Watermark, take
from tether.subjects import EventAddress
from tether.testing import MemoryBus, MemoryServer
from tether_collector.blobs import BlobStore, blob_of_text

TENANT = "acme"


async def register(bus: MemoryBus, log: Log) -> None:
    key = subjects.registration_key(TENANT, log.workspace, "sbx")
    registration = Registration(
        tenant=TENANT,
        workspace=log.workspace,
        sandbox="sbx",
        boot="boot1",
        instance="i1",
        capabilities=(CAN_SNAPSHOT,),
        agents=("scripted",),
    )
    await Bucket(bus, subjects.SANDBOXES).create(key, registration.value(), op="collector", ttl_s=30)


async def test_a_snapshot_in_the_blob_store_is_the_collectors_and_where_it_is_not_stored_the_log_answers(
    tmp_path: Path,
) -> None:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        log = Log(bus, TENANT)
        await log.own("e1")
        events = [log.started("e1"), text_delta(2, "long " * 50_000)]
        await log.frame("e1", events)
        await register(bus, log)
        fold = ExecutionFold()
        for one in events:
            fold.apply(one)
        taken = take(log.target("e1"), fold.freeze(), Watermark(ordinal=2, sequence=1, tag=9), captured_at=77)
        blob, reference = blob_of_text(taken.model_dump_json(exclude_none=True), "json")

        async def answer(message: Message) -> bytes:
            control = decode_request(message.data).control
            result = {"blob": reference}
            return ControlReply(control=control, verb="snapshot", status="settled", result=result).encode()

        path = "/v1/executions/e1/snapshot"
        records, address = Records(bus, TENANT), EventAddress(TENANT, log.workspace, "c1", "e1")
        async with bus.serve(subjects.control_all(TENANT, log.workspace), answer, name="collector"):
            assert (await backend.client.get(path)).json()["source"] == "log"
            await BlobStore(bus, TENANT, log.workspace).put(blob)
            found = (await backend.client.get(path)).json()
            sdk = await records.snapshot(address)
        assert found["source"] == "collector" and found["snapshot"]["captured_at"] == 77
        assert sdk == ("collector", taken)

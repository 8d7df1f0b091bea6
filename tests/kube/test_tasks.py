"""AgentTasks on a real Kubernetes API: real operator, agent service, router, collectors; the node is a model of one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support_kube import Api, Cluster, cluster, core_path, running_api, task_path
from support_nats import NatsServer
from tether import kube
from tether_operator.core.phase import BURIED

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(240)]
EFFECTS = (
    "operator.status_told",
    "operator.make_claim",
    "operator.make_policy",
    "operator.make_pod",
    "operator.ask",
    "operator.end_pod",
    "operator.tell_end",
    "operator.release_pod",
    "operator.tell_event",
    "operator.release",
)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running_api(tmp_path_factory.mktemp("kube")) as found:
        yield found


@pytest.fixture
async def at(api: Api, nats_server: NatsServer, tenant: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(api, nats_server.url, tenant, tmp_path) as found:
        await found.start_operator()
        yield found
        assert found.kubelet.overlaps == [], "two pods of one workspace at the same time"


def named(tenant: str) -> str:
    """A task's name: one API serves all tests of the module."""
    return f"task-{tenant}"


async def says(at: Cluster, name: str, text: str) -> Any:
    """A prompt to the task's conversation, to its end."""
    return await at.client.ask(name, text, agent="scripted", workspace=name)


async def checkpoint_of(at: Cluster, name: str) -> str:
    task = await at.task(name)
    return str((task or {}).get("status", {}).get("checkpointRef") or "")


async def test_k1_a_deleted_task_is_drained_and_its_checkpoint_outlives_it(at: Cluster) -> None:
    name = named(at.tenant)
    await at.apply(name, {"task": {"prompt": "!say hello"}, "agent": {"kind": "scripted"}})
    await at.phase(name, "Idle")
    again = await says(at, name, "!say again")
    assert again.outcome == "completed", again
    volumes = await at.api.ask("GET", core_path("persistentvolumeclaims", kube.claim_name(name)))
    await at.api.ask("DELETE", task_path(name))
    draining = await at.phase(name, "Draining")
    assert draining["metadata"]["deletionTimestamp"]
    await at.gone(name)
    assert "kept in checkpoint" in (await at.events(name))["Checkpointed"]
    after = await at.api.ask("GET", core_path("persistentvolumeclaims", kube.claim_name(name)))
    assert after["metadata"]["uid"] == volumes["metadata"]["uid"], "the volume stays, as asked for"
    pods = await at.api.ask("GET", core_path("pods"))
    assert [pod for pod in pods["items"] if pod["metadata"]["name"].startswith(name)] == []


async def test_k4_on_delete_delete_keeps_neither_checkpoint_nor_volume(at: Cluster) -> None:
    name = named(at.tenant)
    await at.apply(
        name, {"task": {"prompt": "!say hello"}, "agent": {"kind": "scripted"}, "lifecycle": {"onDelete": "delete"}}
    )
    await at.phase(name, "Idle")
    await at.api.ask("DELETE", task_path(name))
    await at.gone(name)
    assert "Checkpointed" not in await at.events(name)

    async def released() -> bool:
        claim = await at.api.ask("GET", core_path("persistentvolumeclaims", kube.claim_name(name)))
        return claim is None or "deletionTimestamp" in claim["metadata"]

    await at.until(released, "the claim's deletion")


async def test_k5_k6_a_suspended_task_has_no_pod_and_a_prompt_wakes_it_for_good(at: Cluster) -> None:
    name = named(at.tenant)
    await at.apply(name, {"task": {"prompt": "!say hello"}, "agent": {"kind": "scripted"}})
    await at.phase(name, "Idle")
    await at.api.merge(task_path(name), {"spec": {"suspend": True}})
    await at.phase(name, "Suspended")

    async def no_pod() -> bool:
        pods = await at.api.ask("GET", core_path("pods"))
        return not [pod for pod in pods["items"] if pod["metadata"]["name"].startswith(name)]

    await at.until(no_pod, "the pod's end")
    woken = await says(at, name, "!say awake")
    assert woken.outcome == "completed"
    task = await at.phase(name, "Idle", "Running")
    assert task["spec"]["suspend"] is True, "it is the user's, and stays"
    [suspended] = [one for one in task["status"]["conditions"] if one["type"] == "Suspended"]
    assert suspended["status"] == "False"
    await at.api.merge(task_path(name), {"spec": {"suspend": False}})
    await at.phase(name, "Idle")
    await at.api.merge(task_path(name), {"spec": {"suspend": True}})
    await at.phase(name, "Suspended")
    await at.api.merge(task_path(name), {"spec": {"suspend": False}})
    await at.phase(name, "Idle")
    assert len([pod for pod in at.kubelet.started if pod.startswith(name)]) == 3


async def test_k7_a_pod_that_was_killed_is_told_of_and_followed_by_another(at: Cluster) -> None:
    name = named(at.tenant)
    await at.apply(name, {"task": {"prompt": "!say one\n!ask remove"}, "agent": {"kind": "scripted"}})

    async def waits() -> bool:
        found = await at.client.executions(conversation=name)
        return any(one.state == "waiting" for one in found.executions)

    await at.until(waits, "the approval")
    at.kubelet.kill(at.kubelet.started[-1])

    async def told() -> bool:
        found = await at.client.executions(conversation=name)
        return all(one.state == "ended" for one in found.executions)

    await at.until(told, "what became of it")
    assert (await says(at, name, "!say two")).outcome == "completed"


async def test_k10_a_pod_behind_a_cut_network_is_followed_by_none_until_its_end_is_proven(at: Cluster) -> None:
    name = named(at.tenant)
    await at.apply(name, {"task": {"prompt": "!say one"}, "agent": {"kind": "scripted"}})
    await at.phase(name, "Idle")
    [pod] = [one for one in at.kubelet.started if one.startswith(name)]
    at.kubelet.away = True
    await at.api.ask("DELETE", core_path("pods", pod), {"gracePeriodSeconds": 0})

    async def marked() -> bool:
        found = await at.api.ask("GET", core_path("pods", pod))
        return found is not None and "deletionTimestamp" in found["metadata"]

    await at.until(marked, "the forced deletion")
    body = {"metadata": {"annotations": {BURIED: "boot_another"}}}
    await at.api.merge(task_path(name), body)  # vouching for another boot is no proof of this one
    task = await at.task(name)
    assert task is not None and "ended" not in {k: v for k, v in task["status"].items() if v is not None}
    found = await at.api.ask("GET", core_path("pods", pod))
    assert kube.PROOF in found["metadata"]["finalizers"], "its object stays as long as nobody knows"
    at.kubelet.away = False

    async def proven() -> bool:
        task = await at.task(name)
        return task is not None and bool(task["status"].get("ended"))

    await at.until(proven, "the kubelet's word")
    assert (await says(at, name, "!say two")).outcome == "completed"


async def test_k2_without_a_control_plane_a_deletion_ends_by_its_deadline_and_says_what_was_not_saved(
    api: Api, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    name = named(tenant)
    async with cluster(api, nats_server.url, tenant, tmp_path) as at:
        await at.start_operator()
        await at.apply(
            name,
            {
                "task": {"prompt": "!say hello"},
                "agent": {"kind": "scripted"},
                "lifecycle": {"drainDeadline": "3s", "drainGrace": "1s"},
            },
        )
        await at.phase(name, "Idle")
        [pod] = [one for one in at.kubelet.started if one.startswith(name)]
        at.agent_over.set()  # no agent service answers from here on
        await at.api.ask("DELETE", task_path(name))
        await at.gone(name)
        message = (await at.events(name))["ForcedByDeadline"]
        assert "no checkpoint was made" in message and "3s" in message

        async def released() -> bool:
            return await at.api.ask("GET", core_path("pods", pod)) is None

        await at.until(released, "the pod's own end, by the kubelet's word")


@pytest.mark.parametrize("step", EFFECTS)
async def test_k3_an_operator_that_is_killed_at_any_step_comes_to_the_same_end(
    api: Api, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    name = named(tenant)
    async with cluster(api, nats_server.url, tenant, tmp_path) as at:
        await at.start_operator(TETHER_TEST_FAILPOINT=step)
        await at.apply(name, {"task": {"prompt": "!say hello"}, "agent": {"kind": "scripted"}})
        await revived(at, name, "Idle")
        await at.api.ask("DELETE", task_path(name))
        await revived(at, name, "")
        assert "kept in checkpoint" in (await at.events(name))["Checkpointed"]
        assert at.kubelet.overlaps == []
        assert len([pod for pod in at.kubelet.started if pod.startswith(name)]) == 1


@pytest.mark.parametrize("state", ["suspended", "provisioning", "untouched"])
async def test_k9_a_task_is_deleted_in_whatever_state_it_is(at: Cluster, state: str) -> None:
    name = named(at.tenant)
    prompt = {} if state == "untouched" else {"task": {"prompt": "!say hello"}}
    if state == "provisioning":
        at.kubelet.away = True
    await at.apply(name, {**prompt, "agent": {"kind": "scripted"}, "lifecycle": {"drainDeadline": "20s"}})
    if state == "suspended":
        await at.phase(name, "Idle")
        await at.api.merge(task_path(name), {"spec": {"suspend": True}})
        await at.phase(name, "Suspended")
        reference = await checkpoint_of(at, name)
        assert reference
    elif state == "provisioning":

        async def made() -> bool:
            pods = await at.api.ask("GET", core_path("pods"))
            return any(pod["metadata"]["name"].startswith(name) for pod in pods["items"])

        await at.until(made, "the pod")
    else:
        await at.phase(name, "Pending")
    await at.api.ask("DELETE", task_path(name))
    await at.gone(name)
    if state == "suspended":
        assert reference in (await at.events(name))["Checkpointed"]


async def test_a_spec_that_cannot_be_used_is_refused_by_the_api_by_its_field(at: Cluster) -> None:
    with pytest.raises(AssertionError, match=r"422.*spec\.lifecycle\.onDelete"):
        await at.apply(named(at.tenant), {"lifecycle": {"onDelete": "keep"}})


# --- helpers ---


async def revived(at: Cluster, name: str, phase: str) -> None:
    """Until the task is in this phase ("": gone), with the operator started anew whenever it has died."""

    async def there() -> bool:
        if at.operator is not None and at.operator.returncode is not None:
            await at.start_operator()
        task = await at.task(name)
        return task is None if not phase else task is not None and task.get("status", {}).get("phase") == phase

    await at.until(there, f"{name} in {phase or 'no'} phase", 90.0)

"""Before the operator goes for good: tasks are drained by it, and what it does not finish is let go."""

from __future__ import annotations

from dataclasses import dataclass, field

from tether_operator.leaving import LOOK_S, release_all


@dataclass
class Cluster:
    """Tasks by the seconds that the operator needs for them; None: it never ends with them."""

    needs: dict[str, float | None]
    now: float = 0.0
    deleted: dict[str, float] = field(default_factory=dict)
    stripped: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    async def sleep(self, delay_s: float) -> None:
        self.now += delay_s

    async def names(self) -> list[str]:
        def gone(name: str, need: float | None) -> bool:
            return need is not None and name in self.deleted and self.now >= self.deleted[name] + need

        return [name for name, need in self.needs.items() if not gone(name, need)]

    async def delete_task(self, name: str) -> None:
        self.deleted.setdefault(name, self.now)

    async def strip(self, name: str) -> tuple[str, ...]:
        self.stripped.append(name)
        return (f"{name}-boot",)


async def test_tasks_are_drained_by_the_operator_and_none_is_stripped_that_it_ends() -> None:
    cluster = Cluster({"one": 5.0, "two": 30.0})
    assert await release_all(cluster, wait_s=60, clock=cluster.clock, sleep=cluster.sleep) == []
    assert set(cluster.deleted) == {"one", "two"}
    assert cluster.stripped == []


async def test_what_is_left_when_the_time_is_over_is_let_go_and_named() -> None:
    cluster = Cluster({"one": 5.0, "stuck": None})
    assert await release_all(cluster, wait_s=20, clock=cluster.clock, sleep=cluster.sleep) == ["stuck"]
    assert cluster.stripped == ["stuck"]
    assert 20 <= cluster.now <= 20 + LOOK_S


async def test_without_tasks_nothing_is_waited_for() -> None:
    cluster = Cluster({})
    assert await release_all(cluster, wait_s=20, clock=cluster.clock, sleep=cluster.sleep) == []
    assert cluster.now == 0

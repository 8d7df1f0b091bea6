"""What many rounds came to: the state file that a run goes on from, the table, `reports/chaos.json`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tether.service import write_whole
from tether_chaos.judge import COLUMNS, tally
from tether_chaos.outages import percentile
from tether_chaos.plan import SERVICES
from tether_chaos.round import Result

VERSION: Final = 1
VIOLATIONS_KEPT: Final = 40
FAULT_COLUMNS: Final = ("lost", "duplicated", "reordered", "second_prompts", "repeated_side_effects")


def entry(result: Result, setup: Mapping[str, Any]) -> dict[str, Any]:
    """A round as it is kept. `setup`: the arguments that draw it again."""
    return {
        "seed": result.seed,
        "setup": dict(setup),
        "kills": result.kills,
        "faults": len(result.faults_done),
        "prompts": result.prompts,
        "executions": result.executions,
        "events": result.events,
        "breaks": result.breaks,
        "counts": tally(result.violations),
        "violations": [str(line) for line in result.violations[:VIOLATIONS_KEPT]],
        "violation_count": len(result.violations),
        "reattach_s": result.reattach_s,
        "restart_s": result.restart_s,
        "failover_s": result.failover_s,
        "start_s": result.start_s,
        "slow": result.slow[:VIOLATIONS_KEPT],
        "fault_log": result.faults_done,
        "operations": result.operations,
        "drained": result.drained,
        "seconds": round(result.seconds, 1),
        "recovery_s": round(result.recovery_s, 1),
    }


class State:
    """Rounds so far. With a path they are kept there after each round, and a run goes on from them."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rounds: list[dict[str, Any]] = []
        if path is not None and path.exists():
            value = json.loads(path.read_text(encoding="utf-8"))
            if value.get("version") != VERSION:
                raise ValueError(f"{path}: version {value.get('version')} is not {VERSION}; choose another file")
            self.rounds = value["rounds"]

    def add(self, one: dict[str, Any]) -> None:
        self.rounds.append(one)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps({"version": VERSION, "rounds": self.rounds}).encode())

    @property
    def kills(self) -> int:
        return sum(sum(one["kills"].values()) for one in self.rounds)

    def next_seed(self, first: int, stride: int) -> int:
        """The first seed of the shard that was not run yet."""
        known = {one["seed"] for one in self.rounds}
        seed = first
        while seed in known:
            seed += stride
        return seed


def figures(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of `reports/chaos.json`; re-attach times over all tiers, then by tier."""
    samples = {tier: [s for one in rounds for s in one["reattach_s"].get(tier, ())] for tier in SERVICES}
    every = [sample for found in samples.values() for sample in found]
    counts = {column: sum(one["counts"][column] for one in rounds) for column in COLUMNS}
    return {
        "kills": sum(sum(one["kills"].values()) for one in rounds),
        "executions": sum(one["executions"] for one in rounds),
        "events": sum(one["events"] for one in rounds),
        **{column: counts[column] for column in FAULT_COLUMNS},
        **_times(every),
        "tiers": {
            tier: {"kills": sum(one["kills"].get(tier, 0) for one in rounds), "samples": len(found), **_times(found)}
            for tier, found in samples.items()
        },
        "seeds": [one["seed"] for one in rounds],
    }


def apart(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is none of the re-attach time: each tier's own from its kill until it was ready; what prompts waited to
    begin after an outage of whatever tier; in a cluster, what a reader waited while a nats-server was away."""
    restarts = {tier: [s for one in rounds for s in one.get("restart_s", {}).get(tier, ())] for tier in SERVICES}
    failovers = [s for one in rounds for s in one.get("failover_s", ())]
    starts = [s for one in rounds for found in one.get("start_s", {}).values() for s in found]
    return {
        "restarts": {tier: _times(found, "restart_s") for tier, found in restarts.items()},
        "prompt_starts": {"samples": len(starts), **_times(starts, "wait_s")},
        "nats_failover": {"samples": len(failovers), **_times(failovers, "wait_s")},
    }


def _times(samples: Sequence[float], name: str = "reattach_s") -> dict[str, float]:
    return {
        f"{name}_p50": round(percentile(samples, 0.5), 3),
        f"{name}_p99": round(percentile(samples, 0.99), 3),
        f"{name}_max": round(max(samples, default=0.0), 3),
    }


def failed(rounds: Iterable[Mapping[str, Any]]) -> list[int]:
    return [one["seed"] for one in rounds if one["violation_count"]]


def write(rounds: Sequence[Mapping[str, Any]], path: Path = Path("reports/chaos.json")) -> bool:
    """True where no round found a violation."""
    clean = bool(rounds) and not failed(rounds)
    environment = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
    value = {
        "verdict": "pass" if clean else "fail",
        "figures": figures(rounds),
        **apart(rounds),
        "two_writers": sum(one["counts"]["two_writers"] for one in rounds),
        "failed_seeds": failed(rounds),
        "rounds": len(rounds),
        "prompts": sum(one["prompts"] for one in rounds),
        "faults": sum(one["faults"] for one in rounds),
        "operations": sum(len(one.get("operations", ())) for one in rounds),
        "drained": sum(one.get("drained", 0) for one in rounds),
        "environment": environment,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return clean


def table(rounds: Sequence[Mapping[str, Any]]) -> str:
    """For people: the whole, then each tier."""
    all_, other = figures(rounds), apart(rounds)
    own = other["restarts"]
    two = sum(one["counts"]["two_writers"] for one in rounds)
    lines = [
        f"kills {all_['kills']}  executions {all_['executions']}  events {all_['events']}  rounds {len(rounds)}",
        "  ".join([*(f"{column} {all_[column]}" for column in FAULT_COLUMNS), f"two_writers {two}"]),
        f"{'re-attach':<14}{'kills':>7}{'samples':>9}{'p50 s':>9}{'p99 s':>9}{'max s':>9}  own start: p50, max",
    ]
    for tier, one in [*all_["tiers"].items(), ("all", {**all_, "samples": _count(all_)})]:
        times = "".join(f"{one[f'reattach_s_{name}']:>9.3f}" for name in ("p50", "p99", "max"))
        restart = "".join(f"{own[tier][f'restart_s_{name}']:>9.3f}" for name in ("p50", "max")) if tier in own else ""
        lines.append(f"{tier:<14}{one['kills']:>7}{one['samples']:>9}{times}{restart}")
    for name, label in (("prompt_starts", "prompts begin"), ("nats_failover", "nats failover")):
        waited = other[name]
        if waited["samples"]:
            times = "".join(f"{waited[f'wait_s_{share}']:>9.3f}" for share in ("p50", "p99", "max"))
            lines.append(f"{label:<14}{'':>7}{waited['samples']:>9}{times}")
    return "\n".join(lines)


def _count(all_: Mapping[str, Any]) -> int:
    return sum(one["samples"] for one in all_["tiers"].values())

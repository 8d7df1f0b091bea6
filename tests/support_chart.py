"""The chart, rendered by the real helm."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tether_k8s.install import find

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "tether"
SETS = ROOT / "tests" / "deploy" / "charts"
NAMES = tuple(sorted(path.stem for path in SETS.glob("*.yaml")))
VERSIONS = ("1.25", "1.30", "1.37")
APIS = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = find("helm")
    if program is None:
        pytest.skip("helm is not installed: `python -m tether_k8s tools` installs it")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


@functools.lru_cache(maxsize=32)
def rendered(name: str, version: str = "1.37", *sets: str) -> str:
    values = [one for pair in sets for one in ("--set", pair)]
    done = helm(
        "template", "demo", str(CHART), "--namespace", "tether", "--kube-version", version, "-f",
        str(SETS / f"{name}.yaml"), *values,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(*sets: str) -> str:
    """What helm says to values that it must not take."""
    done = helm("template", "demo", str(CHART), *[one for pair in sets for one in ("--set", pair)])
    assert done.returncode != 0, f"{sets} was taken"
    return done.stderr


@functools.lru_cache(maxsize=32)
def objects(text: str) -> list[dict[str, Any]]:
    """Shared by the tests of a process: not to be changed."""
    return [one for one in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if one]


def named(text: str, kind: str, name: str) -> dict[str, Any]:
    return next(one for one in objects(text) if one["kind"] == kind and one["metadata"]["name"] == name)


def pods(text: str) -> dict[str, dict[str, Any]]:
    """Specs of pods by `Kind/name`, of workloads and of bare pods."""
    found = {}
    for one in objects(text):
        if one["kind"] in ("Deployment", "StatefulSet", "Job"):
            found[f"{one['kind']}/{one['metadata']['name']}"] = one["spec"]["template"]["spec"]
        elif one["kind"] == "Pod":
            found[f"Pod/{one['metadata']['name']}"] = one["spec"]
    return found

"""The adapter that the documentation shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support_execution import CLAIM, TARGET, Rig, launch
from tether import events as ev
from tether_collector.core.adapters.base import Adapter
from tether_collector.core.execution import Execution

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"


def documented() -> Adapter:
    [code] = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class Mine" in block
    ]
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    adapter: Adapter = names["Mine"]()
    return adapter


def test_the_adapter_of_the_documentation_carries_a_prompt_to_its_end() -> None:
    rig = Rig()
    rig.adapter = documented()
    rig.execution = Execution.start(launch(), rig.adapter, TARGET, CLAIM)
    rig.write_all()
    rig.say({"say": "hello"}, b"not JSON", {"of": "another day"}, {"done": True})
    rig.exit()
    rig.prove()
    assert rig.types() == [
        ev.TEXT_COMPLETED,
        ev.SESSION_BOUND,
        ev.RAW,
        ev.RAW,
        ev.TURN_COMPLETED,
        ev.RESPONSE_ENDED,
        ev.EXECUTION_ENDED,
    ]
    assert rig.body(ev.EXECUTION_ENDED)["outcome"] == "completed"
    refused = rig.control("ctl-1", "interject", request="r", content=[{"type": "text", "text": "x"}])
    assert refused == [], "nothing follows the end"

"""An agent that tells everything it was given: it speaks the scripted agent's lines, and prints the value of the
variable LEAK_NAMES names in every place where an agent's words go, in pieces of LEAK_PIECE characters.

Between the two halves of its turn it waits for the file LEAK_GATE. `LEAK_TEXT`: printed as well, as it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def stream(kind: str, text: str, piece: int, **named: str) -> None:
    for start in range(0, len(text), piece):
        say(type=kind, text=text[start : start + piece], **named)


def main() -> None:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    session = options.get("--session-id") or options["--resume"]
    prompt = json.loads(sys.stdin.readline())["id"]
    names = os.environ["LEAK_NAMES"].split(",")
    leak = " and ".join(f"{name}={os.environ[name]}" for name in names) + os.environ.get("LEAK_TEXT", "")
    piece = int(os.environ.get("LEAK_PIECE", "7"))
    say(type="session", session_id=session, agent="scripted", version="1.0.0")
    say(type="turn.started", prompt=prompt)
    sys.stderr.write(f"warning: {leak}\n")
    sys.stderr.flush()
    first = f"the key is {leak}, "
    stream("delta", first, piece, segment="s1")
    gate = Path(os.environ["LEAK_GATE"])
    while not gate.exists():
        time.sleep(0.01)
    second = f"once more: {leak}."
    stream("delta", second, piece, segment="s1")
    say(type="text", segment="s1", text=first + second)
    say(type="reasoning", text=f"I think of {leak}")
    say(type="tool.start", id="t1", name="Bash", input={"command": f"curl -H 'x-api-key: {leak}'", "n": [{"k": leak}]})
    stream("tool.progress", f"{leak}\n" * 3, piece, id="t1")
    say(type="tool.end", id="t1", status="ok", output=f"{'x' * 40_000}{leak}\n" * 4)
    say(type="tool.start", id="t2", name="Bash", input={})
    stream("tool.progress", f"only told: {leak}", piece, id="t2")
    say(type="tool.end", id="t2", status="interrupted")
    say(type="ask", request="r1", kind="approval", tool="Write", tool_id="t3", input={"text": leak})
    answer = json.loads(sys.stdin.readline())
    Path(os.environ["LEAK_GATE"]).with_name("answered.json").write_text(json.dumps(answer))
    say(type="ask.resolved", request="r1", decision=answer["decision"])
    say(type="unheard-of", leak=leak)
    say(type="usage", prompt=prompt, input_tokens=1, output_tokens=1, cost_usd=0.0)
    say(type="result", status="error", prompt=prompt, text="", code="leaked", message=f"failed with {leak}", usage={})


if __name__ == "__main__":
    main()

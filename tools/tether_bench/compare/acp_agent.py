"""A small ACP agent over stdio: a prompt is a plan (`writing`), each token one chunk. It ends with its turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from tether_bench.compare.writing import perform


def answer(request: dict[str, Any], result: dict[str, Any]) -> None:
    _print({"jsonrpc": "2.0", "id": request["id"], "result": result})


def _print(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def _say(tokens: Sequence[str]) -> None:
    for token in tokens:
        _print(chunk("bench", token))


def chunk(session: str, token: str) -> dict[str, Any]:
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": f"{token} "}}
    return {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": session, "update": update}}


def main() -> int:
    for line in sys.stdin:
        request = json.loads(line)
        match request.get("method"):
            case "initialize":
                answer(request, {"protocolVersion": 1, "agentCapabilities": {}})
            case "session/new":
                answer(request, {"sessionId": "bench"})
            case "session/prompt":
                plan = json.loads(request["params"]["prompt"][0]["text"])
                perform(plan, _say)
                answer(request, {"stopReason": "end_turn"})
                return 0
            case _ if "id" in request:
                answer(request, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())

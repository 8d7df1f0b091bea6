"""The noisy tenant, in a process of its own: what it costs is not on the clock of who is measured.

stdin: one line of JSON {"url", "token", "number", "callers", "readers"}; it goes on until stdin ends, then prints what
it was answered, as JSON, and ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import Counter
from typing import Any, Final
from urllib.parse import urlsplit

import uvloop

from tether import Client
from tether.errors import BusError, ProblemError
from tether_bench.readers import raise_descriptors
from tether_load.readers import Crowd, Reader

FLOOD: Final = "!flood 3000"  # some seconds at the quota: what was printed is told, also after a stop
_BREAK_S: Final = 2.0
_RETRY_S: Final = 0.05


async def make(given: dict[str, Any]) -> Counter[str]:
    """Until stdin ends; how often it was answered what."""
    address = urlsplit(given["url"])
    crowd = Crowd(address.hostname or "127.0.0.1", address.port or 80, given["token"])
    noise: Counter[str] = Counter()
    number, callers = given["number"], given["callers"]
    client = Client.http(given["url"], given["token"])
    tasks = [asyncio.create_task(_caller(client, number, index, noise)) for index in range(callers)]
    names = [f"noise-{number}-{index % callers}-0" for index in range(given["readers"])]
    readers = [Reader(index, crowd, name, once=False) for index, name in enumerate(names)]
    tasks += [asyncio.create_task(one.run()) for one in readers]
    over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not over.done():
        await asyncio.wait({over}, timeout=_BREAK_S)
        for one in readers[::3]:
            one.break_off()
        for task in tasks:
            if task.done():
                task.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    noise["reader connections"] = crowd.answers["200"]
    noise["QUOTA_EXCEEDED"] += crowd.answers["QUOTA_EXCEEDED"]
    return noise


async def _caller(client: Client, number: int, caller: int, noise: Counter[str]) -> None:
    """Prompts without a pause, each a flood in a conversation of its own; a refused one is tried again soon."""
    for index in itertools.count():
        name = f"noise-{number}-{caller}-{index}"
        try:
            told = await client.prompt(name, FLOOD, agent="scripted", workspace=f"w{caller % 2}", patience_s=0.1)
        except ProblemError as error:
            noise[error.problem.code.value] += 1
            await asyncio.sleep(_RETRY_S)
        except BusError:
            noise["bus"] += 1
        else:
            noise["prompts pending" if told.execution is None else "prompts admitted"] += 1


def main() -> None:
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    raise_descriptors(2 * given["readers"] + 512)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        noise = runner.run(make(given))
    print(json.dumps(noise), flush=True)


if __name__ == "__main__":
    main()

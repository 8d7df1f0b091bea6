"""What waits behind a prompt in its conversation: the takeovers among it."""

from __future__ import annotations

from tether import subjects
from tether.errors import InvalidError
from tether.limits import WAITING_PROMPTS_MAX
from tether.ports import Bus
from tether.prompt import Prompt, decode_prompt
from tether_router.records import Records


async def later_takeover(bus: Bus, records: Records, subject: str, after: int, request: str) -> str | None:
    """The last request whose stored prompt comes after sequence `after` and takes the conversation over, other than
    `request`. A repetition of what has its outcome already, and another payload of a known request, take nothing.
    Raises BusError."""
    found: str | None = None
    for _ in range(WAITING_PROMPTS_MAX):
        message = await bus.next_after(subjects.PROMPTS_STREAM, after, subject)
        if message is None:
            break
        after = message.sequence
        try:
            prompt = decode_prompt(message.data)
            takes = prompt.mode == "takeover" and prompt.request_id != request
            if takes and subject == _subject(prompt) and await _is_open(records, prompt):
                found = prompt.request_id
        except InvalidError:
            continue  # poison, or a record that nobody can read
    return found


def _subject(prompt: Prompt) -> str:
    return subjects.prompt(prompt.tenant, prompt.workspace, prompt.conversation)


async def _is_open(records: Records, prompt: Prompt) -> bool:
    record = (await records.request(subjects.request_key(prompt.tenant, prompt.request_id))).record
    if record is None:
        return True
    again = record.state == "retryable" and prompt.attempt > record.attempt
    return again and record.digest == prompt.digest

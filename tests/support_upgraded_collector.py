"""The collector with a later version of the scripted adapter: run by path, with a collector's environment."""

from __future__ import annotations

import sys
from typing import Any

from tether import events as ev
from tether_collector import __main__ as service
from tether_collector.core.adapters import ADAPTERS
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters.scripted import Scripted
from tether_collector.core.inputs import Draft, OutputLine


class Later(Scripted):
    """Says one event more for each completed text."""

    version = "2"

    def on_line(self, state: dict[str, Any], line: OutputLine) -> b.Reading:
        reading = super().on_line(state, line)
        extra = [Draft("note.later", {"detail": "of a type that readers do not know"})]
        more = any(draft.type == ev.TEXT_COMPLETED for draft in reading.drafts)
        return b.Reading([*(extra if more else []), *reading.drafts], reading.signals)


if __name__ == "__main__":
    ADAPTERS["scripted"] = Later()
    sys.exit(service.main())

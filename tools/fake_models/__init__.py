"""A model server that answers from a script, for agent CLIs under test: loopback only, stdlib only.

It speaks Anthropic Messages, OpenAI Responses and OpenAI Chat Completions. It keeps no conversation: the reply is
chosen from the one in the request, by a directive `[[name:argument]]` in the newest user text that holds one (see
`script`). `FakeModels` runs it inside a test, `python -m fake_models` by itself.
"""

from fake_models.server import FakeModels

__all__ = ["FakeModels"]

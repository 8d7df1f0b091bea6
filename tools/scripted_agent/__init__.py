"""Tether's own test agent: a CLI that does what the script in its prompt says, and keeps a record of it.

It stands where a coding agent stands (NDJSON over stdin and stdout, approvals, tools, resume), misbehaves on
request, and writes its ground truth to a folder that the product never reads. docs/scripted-agent.md is its
reference. It starts in a few milliseconds, so it imports little: no argparse, dataclasses, typing, asyncio.
"""

VERSION = "1.0.0"

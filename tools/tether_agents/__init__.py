"""The agent CLIs that Tether drives: which version, where it lies, how it gets there.

`locate` finds a CLI and checks its version; `install` puts the pinned one into a cache outside the clone.
`python -m tether_agents install claude` and `python -m tether_agents find claude` are the same by hand.
"""

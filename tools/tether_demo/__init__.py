"""The main job, shown and judged: `make demo`.

Starts a whole set in a temporary folder, sends prompts to the scripted agent over HTTP and over NATS, shows the
stream, asks and answers an approval, breaks a reader off in mid-stream again and again, kills every service once while
the agent works, and lets the oracle compare what the agent says it printed with what each reader got and what the
projection holds. Nothing lost, nothing doubled, or the exit code says so.
"""

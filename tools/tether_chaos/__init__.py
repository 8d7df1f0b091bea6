"""A whole set under load and seeded faults, judged by the oracle: `make chaos`.

A round is drawn from one seed: the conversations and what is said in them, the readers and when they are broken off,
the faults and when they hit. Prompts go over HTTP and NATS, some through both at once, some race. Meanwhile router,
agent service, backend, collectors and nats-server are killed, or stopped and let go on. When all of it is over, the
agent's own record is held against what each reader got, against the log, and against the projection.

The seed repeats the plan; what the machine makes of it differs from run to run.
"""

"""Many tenants at once on one machine: what is admitted, what is refused, what one of them does to the others.

    prompts   1,000 prompts of 200 tenants at the same moment, at most 40 executions running: each is admitted or
              refused by name, what waits runs in the end, and what agents did is what the logs say (`tether_oracle`)
    readers   1,000 SSE readers broken off and connected again, several times: no error that has no code, no event
              missing, open files and memory back to where they were
    noisy     one tenant sends, floods and follows without end; another one's latencies beside it and without it, in
              alternating rounds

`python -m tether_load [prompts] [readers] [noisy] [--short]` prints a table and writes `reports/load.json`. A verdict
is `pass`, `fail`, or `inconclusive`: a comparison that failed while others used the machine.
"""

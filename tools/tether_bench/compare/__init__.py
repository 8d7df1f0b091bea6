"""`make bench-compare`: Tether beside what a user would pick instead, in one run.

    python -m tether_bench.compare install        the pinned packages from npm and PyPI, into the cache
    python -m tether_bench.compare run            measures; nothing is fetched
        [--short] [--only CONTENDER…] [--report PATH]

Versions are in `pins.toml`; they are installed below `$XDG_CACHE_HOME/tether/compare/`, outside the clone. A contender
that is not installed is left out and named.

tether            CLI → keeper → collector → JetStream → backend → SSE.
sandbox-agent     rivet's server: agent process → HTTP server → SSE. It runs this comparison's own ACP agent, by a
                  launcher in the place of its mock agent's.
durable-streams   the read side alone: a client appends by HTTP, one event a request as they come; readers by SSE. The
                  Node reference server with its file store, which syncs each append to disk. As
                  durable-streams-memory the same server without a store.
redis-streams     the read side alone: `XADD`, readers by blocking `XREAD`; append-only file, synced each second.
pipe              the agent's stdout, read by this process: what no service at all costs.

All get the same events: one token of text each, at the same rates, written by one process for each stream, which notes
each in a file right before it writes it. Servers are all up throughout; in each round every contender is measured in
turn, so that all see the same machine. A figure is the median of the rounds.

latency_ms_p50_x1, latency_ms_p50_x20, latency_ms_p99_x20
    1 or 20 streams of 20 events a second each, one reader for each: write → received.
events_per_s, events_lost
    One stream of 20,000 events as fast as its writer can and one reader that is live: from the first write until the
    last is received. The writers of durable-streams and redis-streams append 64 events at once (an array, a pipeline)
    and wait for the answer, as one must who wants to know that they are stored. Tether merges deltas that wait: fewer
    and larger events, the same text. What it does with lines that cannot be merged is `collector_lines_per_s` of
    `make bench`.
reconnect_1000_ms, reconnect_1000_kb, reconnect_20000_ms, reconnect_20000_kb
    On that stream a reader connects that stopped 1,000 events, or 20,000, before its end, with the position that it
    kept then: until it has the last one, and what came over the wire. `lost` where it cannot be told what is missing.
kill:<what>
    50 events a second for 4 s. After 1.5 s <what> is killed by SIGKILL; what does not come back by itself is started
    again at once. The reader connects anew with its position until it has the last event. Events that it never got,
    that it got twice, and the longest time without one. A writer of durable-streams or redis-streams repeats an append
    whose answer it did not get, the former as an idempotent producer.
"""

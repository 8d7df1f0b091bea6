"""`make bench`: figures of the running product, each beside a baseline of the same run.

    python -m tether_bench [--short] [--only NAME…] [--soak-s N] [--seconds N] [--report PATH]

A whole set is started (`tether_cli.set`, an ephemeral one), loaded through its public edges, and ended. Each figure is
the median of several rounds; a round measures the baseline and the product one after the other, so that both see the
same machine, and the ratio says more than the figure. Printed as one table and written to `reports/bench.json`
(`verdict, figures, environment`, and `details` with rounds and baselines). The verdict is `fail` where a figure could
not be measured or something was lost or doubled; a missed target is printed and fails nothing.

All clocks are this machine's `time.time()`. "Bare pipe" is the same scripted agent with the same script, its stdout
read by this process.

added_latency_ms_p50_x1, _x20, _x100, added_latency_ms_p99_x20
    N executions in one sandbox, each printing 20 deltas a second, phases spread over the 50 ms. From the moment at
    which the agent notes the line in its truth file, right before its write, until the chunk with the event has been
    received on an SSE connection (one per conversation, raw sockets in one thread, parsed after the round). Each delta
    is one sample, merged deltas give one sample for each that they cover; the percentile is taken per round. Processes
    start before the first round and wait for a file between rounds. Baselines: `pipe`, and `nats`: a core publish →
    subscribe of the same number of subjects and messages a second on the set's nats-server, this process at both ends.
    A delta that does not come, or comes twice, is counted as lost or doubled. x100 is left out of --short.

first_event_ms_p50
    From before the POST of a prompt (a kept connection, a new conversation in a warm sandbox) to the first event of the
    execution on an SSE connection that was open before: admission, command, claim. Baseline `pipe`: spawning the
    scripted agent until its first line.
first_output_ms_p50
    The same until the first event that the CLI printed (its session): with keeper and CLI started.

collector_lines_per_s
    One collector, one execution of `!lines 50000`, printed as fast as the agent can. Lines over the time from the first
    line's note in the truth file until the projection's consumer has acked the frame of the last one: all spooled,
    mapped, stored and projected. Every line is then looked for in the log, and counted in the projection's rows.
    Baseline `pipe`. `collector_stored_lines_per_s`: the same until the last frame was stored (the server's clock).

answer_ms_p50
    From before the POST of an approval's answer (a kept connection) until the CLI has read its bytes from stdin, which
    the agent notes in its truth file; the execution asks again and again. Baselines: `pipe`, the same answer written
    into a bare agent's stdin; `http`, a question of the API that touches no bus. `answer_receipt_ms_p50`: until the
    answer's receipt is there.

takeover_ms_p50
    From before the POST of a prompt with `mode: takeover` to the claim of its execution on an open SSE connection, in a
    conversation whose CLI obeys an interrupt at once: the decision, one stop, the old process's end with its proof, the
    admission, the command, the claim. Baseline `idle`: the same prompt where nothing runs.

collectors_4_lines_per_s
    As `collector_lines_per_s`, with four workspaces, so four collectors, each with an execution that prints a quarter
    of the lines at the same time: all lines over the time from the first of any until the projection has acked the last
    of all. Every line is looked for. Baselines: `one`, one collector with all the lines; `pipes`, the four agents on
    bare pipes.

readers_1000_cut, readers_1000_ms_p99, readers_1000_ms_p50
    One conversation whose CLI prints 50 deltas a second, and 1,000 SSE readers in two processes of their own
    (`reader_process`: raw sockets, a `recv` and the time for each piece, looked through after the round). They connect
    before the first round and stay. Each delta of each reader is one sample, from the moment noted in the truth file;
    percentiles over all samples of a round. `cut`: connections that the service closed, over all rounds; a delta that a
    reader did not get is lost. Baselines, to as many sockets of the same processes: `nats`, a core publish of the same
    bytes at the same rate, delivered by the set's nats-server; `tcp`, an event loop of this process that writes the
    bytes to each connection and does nothing else.

projection_events_per_s
    An execution's frames (completed texts and tool calls, none that merge; 512 events a frame, encoded before) are
    published to the log as fast as they are acked. Events over the time from the first publish until the projection's
    consumer has acked the last. Baseline `read`: batch reads of the same frames and decoding them.

attach_ms_p50_100, _10000, _200000
    A reader that knows nothing attaches to a running execution of so many events (published as above): live
    subscription, barrier, the snapshot (one page of history over HTTP, with its cursor), the log's end from the leader,
    the suffix after the cursor, caught up; by the SDK's own follower. Baseline `replay`: the same without a snapshot,
    every event from the first.

rss_mib, keeper_rss_mib
    VmRSS of each process: `idle` after the set is up and one sandbox warm, `loaded` after everything that was measured
    before it (alone: after one flood of 20,000 lines). The keeper's while it holds a waiting CLI.

rss_growth_mib_10min
    Only with `--soak-s N` or by name (600 s then). Six conversations in one sandbox, each with one execution after
    another (a tool with output, 100 deltas in 2 s, a text), each time read by a new reader that begins after the
    history. After a warm-up of a third of N, 120 s at most, VmRSS of each process is taken each second. The slope is
    Theil and Sen's over the medians of 20 stretches of N; the figure is that slope times 600 s. **Flat**: not above
    the slope's noise, which is the lower half of its 95 % interval (so that no growth is within it), or 2 MiB. Below
    300 s there is no verdict.

resume_warm_ms_p95
    From before the POST of a prompt whose sandbox is suspended, its processes gone and its volume there, to the first
    event that the resumed session's CLI printed, on an SSE connection that was open before; p95 of a round's. The same
    conversation sleeps and goes on again and again, and each time the agent says how many earlier turns it remembers:
    one that it does not is lost. Baselines: `own start`, the same until the first event of the CLI in new
    conversations of a new sandbox that is awake, p95 as well; `claim`, of the resumed ones until the execution's claim.
resume_cold_s_p95
    The same with a drain into the blob store and the volume deleted after it: the session, the collector's state and
    1 MiB of files come back from blobs.

drain_20_s, in --short drain_5_s
    So many sandboxes, each with an execution that waits for an approval, drained at once (an order each from a thread
    of its own): from before the first order until the last final report, which says that the compute is released.
    Each report must name its execution as cut. Baseline `one`: a single sandbox.

checkpoint_1mib_s, _50mib_s, _500mib_s, checkpoint_stored_bytes
    From before the POST of a drain (`include: workspace`, `store: blobs`) of a sandbox in which nothing runs to its
    final report; in its folder so much that was never stored, in files of 64 KiB (1 MiB) or 1 MiB. Stored bytes: what
    JetStream says that the blob store grew by. Baseline `copy`: the same files read, digested with sha-256, written and
    synced one after the other by this process. 500 MiB is left out of --short; it needs 3 GiB of JetStream's room.

lost, duplicated
    Over all figures.
"""

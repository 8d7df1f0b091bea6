"""The keeper: one tiny process per CLI process, which outlives the collector.

It alone holds the CLI's stdin, stdout and stderr. Standard library only, no asyncio, few imports: its memory is
paid once per running agent. `__main__` is started by file path, so that it needs neither site-packages nor an
installed distribution.

    records     the spool's record format (shared with the reader in the collector)
    spool       the append-only writer: segments, rotation, quota
    lines       output bytes into line records
    launch      the launch specification, the spawn record, the lock
    linux       the few system calls that `os` does not offer, and the sweep over /proc
    spawn       CLI and tiny init: the PID namespace, the hand-shake before exec
    stdin_pipe  what is written to the CLI, once per control id
    control     the unix socket and its operations
    core        the loop and the end: exit, drain, kill, proof
"""

"""Fuzzing of everything that reads what others wrote: `python -m tether_fuzz [TARGET…] --seconds N --seed S`.

    committed corpus + seeds ─▶ mutate ─▶ target(data) ─▶ features ─▶ new ones: the input joins the pool
                                             │
                                             ├─ raised, or a law of the target does not hold      finding "crash"
                                             ├─ more CPU time than its deadline                   finding "hang"
                                             └─ more memory than its bound                        finding "memory"

A target is a function of bytes that raises nothing but what it documents (which it catches itself) and checks its own
laws. It runs in a child process with a limit of its address space; a watchdog beside it ends one that answers no more.
The input under way lies in a file that both map, so it is known whatever became of the child. A finding is made smaller
and kept under `reports/fuzz`; mended, it moves to the corpus, which a test replays.

Features are the lines of the product that ran, and whatever the target says of its input (the field that was refused,
the kinds of events that came out), since validation runs in compiled code that no line shows.

The HTTP edge is asked over its sockets, by Schemathesis and by hand: see `tether_fuzz.edge`.
"""

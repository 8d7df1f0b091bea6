"""The entry process of a sandbox that is a container: pid 1 over one collector. Standard library only.

    core   what to do on a signal, an end, a timer: pure
    run    the loop: signals in, children reaped, effects performed
    files  the files that a collector needs, handed over on stdin into a folder in memory

`__main__` is started by file path, so that it needs neither site-packages nor an installed distribution.
"""

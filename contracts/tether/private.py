"""Whether a file with a secret is ours alone."""

from __future__ import annotations

import os
import stat


def open_to_others(facts: os.stat_result) -> bool:
    """Somebody else may read or write it. A file of root's that a group of ours may read, and no more, is not: so
    Kubernetes mounts a Secret, for the group that the pod was given (`fsGroup`)."""
    mode = stat.S_IMODE(facts.st_mode)
    if not mode & 0o077:
        return False
    mounted = facts.st_uid == 0 and os.geteuid() != 0 and facts.st_gid in {os.getegid(), *os.getgroups()}
    return not mounted or bool(mode & 0o037)

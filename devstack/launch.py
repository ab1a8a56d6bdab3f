"""A child's first steps: it takes on its account, asks to end with its parent, and becomes its program.

Run as a file, with nothing but the standard library: `launch.py PARENT ACCOUNT PATH ARGUMENT…`, where an
empty ACCOUNT is the parent's own. It is a program of its own, and no `preexec_fn`, because a process with
threads may not run code between fork and exec: gRPC starts its threads again there, and one child in some
dozens is aborted. Without one, Python starts children by vfork, which no handler sees.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_BE_RUN = 126  # as shells have it


def end_with(parent: int, number: signal.Signals) -> None:
    """This process gets the signal when its parent ends, even by SIGKILL: when the thread of it ends that
    started this process. Says so by the kernel's means, for the parent may have no time for anything."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), number)


def _main(parent: str, account: str, *command: str) -> int:
    """Returns only where the program cannot be run."""
    # Python ignores these; another program inherits what is ignored.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        if account:
            entry = pwd.getpwnam(account)
            os.setgroups([])
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
        end_with(int(parent), signal.SIGKILL)  # the kernel forgets it where the account changes
        os.execv(command[0], command)  # of a path: execvp imports, from folders that may be root's
    except (OSError, KeyError) as error:
        print(f"{command[0]} cannot be run: {error}", file=sys.stderr)
        return _CANNOT_BE_RUN


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))

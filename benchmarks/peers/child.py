"""`python -m benchmarks.peers.child PARENT COMMAND ...`: becomes the command, which the kernel ends when the
parent dies, however it dies. Servers of others do not know whose they are."""

import os
import sys

from kvcommons.rpc.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])

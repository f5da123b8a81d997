"""Runs a command and writes the peak memory of it and its descendants, in bytes, to an open file:

    python -I -S measured.py FD COMMAND [ARGUMENT...]

On Linux the largest size of a process outlives exec, and a child starts with its parent's: started directly, a command
is never smaller than a parent that has imported PyTorch. This one stands between them and is small.
"""

import os
import signal
import sys

fd, command = int(sys.argv[1]), sys.argv[2:]
os.set_inheritable(fd, False)
# Ends when the command has: a signal to the group is the command's to follow.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = os.posix_spawnp(command[0], command, os.environ, setsigdef=[signal.SIGTERM])
_, status, usage = os.wait4(pid, 0)
os.write(fd, b"%d" % (usage.ru_maxrss * 1024))
code = os.waitstatus_to_exitcode(status)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)

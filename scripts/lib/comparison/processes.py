"""Runs groups of processes to their end: when one fails or the time is up, all of them are ended."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass


class PartFailed(Exception):
    """A process of a part returned non-zero, or the part ran into its time limit."""


@dataclass
class Member:
    process: subprocess.Popen
    code: int | None = None
    peak_bytes: int = 0  # of memory, its own and that of its largest descendant

    def poll(self):
        if self.code is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.process.returncode = self.code  # Popen must not wait for it again
                self.peak_bytes = usage.ru_maxrss * 1024
        return self.code


def end(members, grace=5.0):
    """Ends what still runs, with everything it started: each member leads a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for member in members:
            try:
                os.killpg(member.process.pid, number)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + grace
        while [member for member in members if member.poll() is None] and time.monotonic() < deadline:
            time.sleep(0.05)


def run_group(commands, timeout, log, environment=None, directory=None):
    """Starts the commands together and waits for all; their output goes to the file `log`. Returns the members' peak
    memory in bytes. Throws PartFailed with the end of the log."""
    members = []
    deadline = time.monotonic() + timeout
    with open(log, "ab") as output:
        try:
            for command in commands:
                process = subprocess.Popen(
                    [str(word) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=directory,
                    start_new_session=True,
                )
                members.append(Member(process))
            failure, running = None, members
            while running and failure is None:
                time.sleep(0.05)
                running = [member for member in members if member.poll() is None]
                failed = next(((i, m.code) for i, m in enumerate(members) if m.code), None)
                if failed:
                    failure = f"process {failed[0]} of {len(members)} returned {failed[1]}"
                elif running and time.monotonic() > deadline:
                    failure = f"it did not end within {timeout:g} s"
        finally:
            end(members)
    if failure:
        with open(log, errors="replace") as text:
            tail = "".join(text.readlines()[-15:])
        raise PartFailed(f"{failure}; the end of its output:\n{tail}")
    return [member.peak_bytes for member in members]

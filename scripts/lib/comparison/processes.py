"""Runs groups of processes to their end: when one fails or the time is up, all of them are ended."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MEASURED = Path(__file__).with_name("measured.py")


class PartFailed(Exception):
    """A process of a part returned non-zero, or the part ran into its time limit."""


@dataclass
class Member:
    process: subprocess.Popen
    peak: int  # a pipe that the peak memory comes through

    @property
    def code(self):
        return self.process.returncode

    def poll(self):
        return self.process.poll()

    def peak_bytes(self):
        """Of the largest among the command and its descendants."""
        return int(os.read(self.peak, 32) or 0)


def start(command, **options):
    reading, writing = os.pipe()
    words = [sys.executable, "-I", "-S", MEASURED, writing, *command]
    try:
        process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(writing,),
            **options,
        )
    finally:
        os.close(writing)
    return Member(process, reading)


def last_line(log):
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


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


def run_group(commands, timeout, log, environment=None, directory=None, tell=None, every=10.0):
    """Starts the commands together and waits for all; their output goes to the file `log`. Meanwhile calls tell(seconds,
    last line of the log) `every` so many seconds. Returns the members' peak memory in bytes. Throws PartFailed with the
    end of the log."""
    members = []
    began = told = time.monotonic()
    deadline = began + timeout
    with open(log, "ab") as output:
        try:
            for command in commands:
                members.append(start(command, stdout=output, env=environment, cwd=directory))
            failure, running = None, members
            while running and failure is None:
                time.sleep(0.05)
                running = [member for member in members if member.poll() is None]
                failed = next(((i, m.code) for i, m in enumerate(members) if m.code), None)
                if failed:
                    failure = f"process {failed[0]} of {len(members)} returned {failed[1]}"
                elif running and time.monotonic() > deadline:
                    failure = f"it did not end within {timeout:g} s"
                elif tell and running and time.monotonic() >= told + every:
                    told = time.monotonic()
                    tell(told - began, last_line(log))
        finally:
            end(members)
            peaks = [member.peak_bytes() for member in members]
            for member in members:
                os.close(member.peak)
    if failure:
        with open(log, errors="replace") as text:
            tail = "".join(text.readlines()[-15:])
        raise PartFailed(f"{failure}; the end of its output:\n{tail}")
    return peaks

"""Commands and code of the documentation's pages, and what they print."""

import contextlib
import io
import re
import shlex
import subprocess

from mrconv.cli import main

BLOCK = re.compile(r"^```(python)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_command(command):
    """Return what a command of the page prints to standard output."""
    program, *arguments = shlex.split(command)
    if program != "mrconv":
        return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(arguments) in (0, None), command
    return out.getvalue()


def blocks(text):
    """Yield for each block of a page its line, its code if it is Python, and its commands with the output shown."""
    for match in BLOCK.finditer(text):
        parts = [] if match[1] else re.split(r"^\$ ", match[2].replace("\\\n", ""), flags=re.MULTILINE)[1:]
        commands = [tuple(part.split("\n", 1)) for part in parts]
        yield text[: match.start()].count("\n") + 1, match[2] if match[1] else "", commands


def comparable(output):
    """Return the sorted lines of an output without numbers, repeated spaces, and the paths of runs and caches."""
    output = re.sub(r"(in )/\S*/(runs)|(cache/folder-)\w+", r"\1\2\3", output.replace(",", ""))
    return sorted(" ".join(re.sub(r"-?[\d.]+(e-?\d+)?", "", line).split()) for line in output.splitlines() if line)

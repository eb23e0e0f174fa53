"""A fuzzer by mutation: files are changed at random and read, in a process of its own with limits.

`check_cases` reads mutations of valid files. Each must be read, or raise one of our errors in one short line that names
the file, without much memory or time. The seed of a case determines its mutation, so that a failure can be repeated.

`make fuzz N=5000` runs 5,000 cases in all of the slow tests, which it passes as MRCONV_FUZZ_CASES; MRCONV_FUZZ_SEED is
the seed of the first case.
"""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mrconv.tasks import DataError

ERRORS = (DataError, ValueError, OSError)
SECONDS, MEMORY = 20, 256 * 2**20
"""Limits of one case."""
MAX_MESSAGE = 1000
DEFAULTS = {"SEED": 100, "CASES": 150}
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1)
TOKENS = (b"\0" * 512, b"\xff" * 64, b"-1", b"1e400", b"nan", b"9" * 400, b'"', b"\\ud83d", b"[" * 3000, b"\n", b"../")


class Subject(NamedTuple):
    """Valid files and the function that reads them.

    Args:
        name: name of the subject, for failures.
        files: content by path.
        read: reads the files in a folder.
        wrap: turns the mutated content of a file into that on disk, such as `gzip.compress`.
    """

    name: str
    files: dict[str, bytes]
    read: Callable[[Path], object]
    wrap: Callable[[bytes], bytes] = bytes


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Return content with one to four random changes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.choice((rng.randrange(len(data) + 1), rng.randrange(min(len(data), 512) + 1)))  # headers are short
        size = rng.choice((1, 4, 16, 512, max(1, len(data) // 3)))
        change = rng.randrange(7)
        if change == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif change == 1:
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice(NUMBERS) % 2 ** (8 * width)
            data[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
        elif change == 2:
            data[at : at + rng.choice((0, size))] = rng.choice(TOKENS)
        elif change == 3:
            del data[at : at + size]
        elif change == 4:
            data[at:at] = data[at : at + size] * rng.choice((1, 3))
        elif change == 5:
            other = rng.randrange(len(data) + 1)
            data[at : at + size] = data[other : other + size]
        else:
            del data[at:]
    return bytes(data)


def cases(subjects: int) -> range:
    """Return the seeds of the cases of one of several subjects."""
    first, total = (int(os.environ.get(f"MRCONV_FUZZ_{name}", default)) for name, default in DEFAULTS.items())
    return range(first, first + -(-total // subjects))


def check_cases(subject: Subject, seeds: Iterable[int], folder: Path) -> None:
    """Assert that nothing is wrong with the cases of these seeds."""
    found = failures(subject, seeds, folder)
    assert not found, f"{len(found)} cases, among them\n" + "\n".join(found[:5])


def failures(subject: Subject, seeds: Iterable[int], folder: Path) -> list[str]:
    """Return what is wrong with the cases of these seeds; a process that reads them is replaced when it ends."""
    seeds, found = list(seeds), []
    while seeds:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_read_cases, args=(subject, seeds, folder, sender))
        process.start()
        sender.close()
        with suppress(EOFError):
            while receiver.poll(SECONDS):
                if problem := receiver.recv():
                    found.append(f"{subject.name}, seed {seeds[0]}: {problem}")
                seeds.pop(0)
        if seeds:
            process.kill()
        process.join()
        if seeds:
            ended = signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"exit {process.exitcode}"
            found.append(f"{subject.name}, seed {seeds.pop(0)}: {ended}, after at most {SECONDS} s")
    return found


def write_case(subject: Subject, seed: int, folder: Path) -> str:
    """Write the files of a case into a folder; return the name of the mutated one."""
    rng = random.Random(f"{subject.name} {seed}")
    chosen = rng.choice(sorted(subject.files))
    write_files(folder, subject.files | {chosen: mutate(subject.files[chosen], rng)}, subject.wrap)
    return chosen


def write_files(folder: Path, files: dict[str, bytes], wrap: Callable[[bytes], bytes] = bytes) -> None:
    """Write files, as `wrap` turns their content into what is on disk."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(wrap(content))


def _read_cases(subject: Subject, seeds: list[int], folder: Path, sender) -> None:
    """Read the cases and send a problem, or "", for each."""
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + 16 * MEMORY,) * 2)  # saves the machine
    warnings.simplefilter("ignore")
    for seed in seeds:
        case = folder / f"{subject.name.replace('/', '-')}-{seed}-{os.getpid()}"
        mutated = write_case(subject, seed, case)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _memory("VmRSS")
        problem = _problem(subject, case, mutated)
        if not problem and (more := _memory("VmHWM") - before) > MEMORY:
            problem = f"{more / 2**20:.0f} MiB of memory"
        sender.send(problem)
        shutil.rmtree(case)


def _problem(subject: Subject, case: Path, mutated: str) -> str:
    try:
        subject.read(case)
    except ERRORS as error:
        message = str(error)
        if Path(mutated).name not in message and case.name not in message:
            return f"does not name {mutated}: {type(error).__name__}: {message}"
        if len(message) - len(str(case)) > MAX_MESSAGE or "\n" in message or not message.isprintable():
            return f"not one short line: {message[:1000]!r}"
    except BaseException:
        return traceback.format_exc()
    return ""


def _memory(name: str) -> int:
    """Return a number of bytes of /proc/self/status: VmSize, VmRSS (resident) or VmHWM (its peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

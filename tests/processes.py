"""Commands in other processes, forked from a server that has imported torch and Lightning, which takes seconds."""

import multiprocessing
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

from torch.multiprocessing import start_processes

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["mrconv.cli.train", "mrconv.serve", "mrconv.training.loop", "torch.distributed.fsdp"])


class Command:
    """`python -m MODULE ARGUMENTS` with the interface of `subprocess.Popen`: its output is text in two pipes.

    With `terminal`, the path of one, the command runs in it instead.
    """

    def __init__(self, module, *arguments, environment=None, terminal=None):
        pipes = [] if terminal else [CONTEXT.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in pipes]
        given = module, list(map(str, arguments)), dict(os.environ if environment is None else environment)
        self.process = CONTEXT.Process(target=_run, args=(*given, writers, terminal))
        self.process.start()
        for writer in writers:
            writer.close()
        self.stdout, self.stderr = [os.fdopen(os.dup(reader.fileno())) for reader, _ in pipes] or (None, None)
        self.terminate, self.kill, self.sentinel = self.process.terminate, self.process.kill, self.process.sentinel

    @property
    def returncode(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def wait(self, timeout=300):
        self.process.join(timeout)
        assert self.returncode is not None, f"the process still runs after {timeout} s"
        return self.returncode

    def communicate(self, timeout=300):
        """Wait for the end; return the rest of what the command wrote to stdout and to stderr."""
        with ThreadPoolExecutor(2) as threads:
            output = [threads.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self.wait(timeout)
        self.stdout.close()
        self.stderr.close()
        return tuple(each.result() for each in output)


def run_processes(function, *arguments):
    """Call function(rank, *arguments) in two processes, ranks 0 and 1."""
    start_processes(function, arguments, nprocs=2, start_method="forkserver")


def _run(module, arguments, environment, writers, terminal):
    descriptors = [os.open(terminal, os.O_WRONLY) for _ in range(2)] if terminal else [w.fileno() for w in writers]
    for stream, descriptor in zip((sys.stdout, sys.stderr), descriptors, strict=True):
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
        stream.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

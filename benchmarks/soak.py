"""Soak test: kills during training, and many requests and streams at once; counts what was lost or wrong.

python benchmarks/soak.py [--requests 10000] [--streams 200] [--kills 4] [--out benchmarks/results/soak-cpu.json]

Trains a small model on generated ListOps, in one process and in two, without interruption and with SIGKILL to all
processes of the run at random times. The weights of the resumed runs must be equal, bit for bit, to those of the
uninterrupted ones. Then serves the model: clients send requests and streams at once, and every answer is compared with
the prediction of the library. Last, ten streams that never wait for an answer, and 24 large lists of tokens at once,
delay other requests. Exits with 1 if anything was lost or wrong. All traffic stays on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from websockets.asyncio.client import connect

import mrconv
from mrconv.bench.records import record, write
from mrconv.bench.timing import copy_bandwidth, progress
from mrconv.inference import Prediction, Predictor
from mrconv.tasks.vocabulary import SPECIAL

TRAIN = ("experiment=demo", "d_model=16", "epochs=4", "accelerator=cpu", "task.train_size=1000", "task.val_size=100",
         "task.test_size=100")  # fmt: skip
CLIENTS, CONCURRENT_STREAMS, INPUTS, CHUNKS = 32, 16, 50, 5
FLOODS, PROBES, LARGE_LISTS = 10, 40, 24
Row = dict[str, Any]


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """Start a command of mrconv in a process group of its own."""
    command = [sys.executable, "-m", "mrconv", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def run_folder(out: Path) -> Path:
    """Return the folder of the only run."""
    (folder,) = (path.parent for path in out.glob("*/config.yaml"))
    return folder


def train(folder: Path, data: Path, processes: int, kills: int, generator: random.Random) -> int:
    """Train a run and kill it some times; return how often it was killed before its end."""
    options = [f"out={folder}", f"data_dir={data}"] + (["devices=2", "strategy=ddp"] if processes == 2 else [])
    for killed in range(kills + 1):
        process = start("train", *TRAIN, *options)
        assert process.stdout is not None
        if killed < kills:
            for line in process.stdout:
                if line.startswith("epoch"):
                    break
            time.sleep(generator.uniform(0, 1))
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=600)
        if killed < kills and process.returncode == 0:
            return killed  # the run was complete before the signal
        if killed == kills and process.returncode:
            raise RuntimeError(f"the run failed: {output[-2000:]}")
    return kills


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint of a run."""
    return torch.load(run_folder(folder) / "last.ckpt", weights_only=True)["state_dict"]


def soak_training(folder: Path, processes: int, kills: int) -> Row:
    """Compare a run that is killed again and again with one that is not."""
    runs = [folder / f"{name}-{processes}" for name in ("whole", "killed")]
    train(runs[0], folder / "data", processes, 0, random.Random(0))
    killed = train(runs[1], folder / "data", processes, kills, random.Random(processes))
    whole, resumed = map(weights, runs)
    different = [name for name in whole if not torch.equal(whole[name], resumed[name])]
    return {"check": f"training, {processes} process{'es' * (processes > 1)}", "kills": killed, "wrong": len(different)}


def agrees(answer: Row, expected: Prediction) -> bool:
    """Return whether an answer of the server has the probabilities of a prediction."""
    given = answer.get("probabilities", {})
    return all(abs(given.get(name, 2) - p) < 1e-5 for name, p in expected.probabilities.items())


class Server:
    """A server of a model, and inputs with their predictions."""

    def __init__(self, model: Path) -> None:
        predictor: Predictor = mrconv.load(model)
        generator, symbols = random.Random(0), [s for s in predictor.preprocessor.vocabulary if s not in SPECIAL]
        self.inputs = [generator.choices(symbols, k=generator.randint(5, 190)) for _ in range(INPUTS)]
        self.expected = [predictor.predict({"tokens": tokens}) for tokens in self.inputs]
        self.process = start("serve", model, "--port", "0", "--device", "cpu")
        assert self.process.stdout is not None
        self.url = next(line.strip() for line in self.process.stdout if line.startswith("http://"))
        self.socket = self.url.replace("http", "ws") + "/stream"
        self.times: list[float] = []

    def memory(self) -> float:
        """Return the resident memory in MB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)

    async def request(self, client: httpx.AsyncClient, i: int) -> bool:
        """Return whether the answer to a request is correct."""
        began = time.perf_counter()
        answer = await client.post(f"{self.url}/predict", json={"tokens": self.inputs[i % INPUTS]})
        self.times.append(time.perf_counter() - began)
        return answer.status_code == 200 and agrees(answer.json(), self.expected[i % INPUTS])

    async def stream(self, _: httpx.AsyncClient, i: int) -> bool:
        """Return whether a stream ends with the prediction for the whole input."""
        tokens = self.inputs[i % INPUTS]
        size = -(-len(tokens) // CHUNKS)
        async with connect(self.socket) as socket:
            for start in range(0, len(tokens), size):
                await socket.send(json.dumps({"tokens": tokens[start : start + size]}))
                await socket.recv()
            await socket.send('{"end": true}')
            return agrees(json.loads(await socket.recv()), self.expected[i % INPUTS])

    async def repeat(self, job: Callable[[httpx.AsyncClient, int], Awaitable[bool]], count: int, clients: int) -> Row:
        """Run jobs from several clients at once; count those without an answer and those with a wrong one."""
        outcomes = {"answered": 0, "lost": 0, "wrong": 0}

        async def client(number: int) -> None:
            async with httpx.AsyncClient(
                verify=False, timeout=60
            ) as session:  # loads no certificates, which takes long
                for i in range(number, count, clients):
                    try:
                        outcomes["answered" if await job(session, i) else "wrong"] += 1
                    except Exception as error:  # whatever the reason: no answer
                        print(f"{job.__name__} {i}: {error!r}", file=sys.stderr)
                        outcomes["lost"] += 1

        await asyncio.gather(*map(client, range(clients)))
        return outcomes

    async def slowest(self, get: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]) -> float:
        """Return the seconds of the slowest of several requests, one after the other."""
        times, new_connections = [], httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(verify=False, timeout=60, limits=new_connections) as client:
            for _ in range(PROBES):
                began = time.perf_counter()
                (await get(client)).raise_for_status()
                times.append(time.perf_counter() - began)
        return round(max(times), 3)

    async def flood(self) -> Row:
        """Return how long requests take while streams send without waiting for their answers."""

        async def send() -> None:
            message = json.dumps({"tokens": self.inputs[0] * 500})
            async with connect(self.socket, ping_interval=None) as socket:
                while True:
                    await socket.send(message)

        floods = [asyncio.create_task(send()) for _ in range(FLOODS)]
        await asyncio.sleep(1)
        body = {"tokens": self.inputs[0]}
        result = {"slowest_predict_s": await self.slowest(lambda c: c.post(f"{self.url}/predict", json=body))}
        for task in floods:
            task.cancel()
        ended = await asyncio.gather(*floods, return_exceptions=True)
        lost = sum(not isinstance(each, asyncio.CancelledError) for each in ended)
        return {"check": f"{FLOODS} flooding streams", **result, "lost": lost}

    async def large_lists(self) -> Row:
        """Return how long /health takes while large requests are parsed."""
        tokens = self.inputs[0] * (2**17 // len(self.inputs[0]))
        body: Any = {"content": json.dumps({"tokens": tokens}), "headers": {"content-type": "application/json"}}
        all_at_once = httpx.Limits(max_connections=LARGE_LISTS)
        async with httpx.AsyncClient(verify=False, timeout=60, limits=all_at_once) as client:
            lists = [asyncio.create_task(client.post(f"{self.url}/predict", **body)) for _ in range(LARGE_LISTS)]
            slowest = await self.slowest(lambda c: c.get(f"{self.url}/health"))
            lost = sum([(await each).status_code != 200 for each in lists])
        return {"check": f"{LARGE_LISTS} large lists of tokens", "slowest_health_s": slowest, "lost": lost}


async def soak_server(model: Path, requests: int, streams: int) -> list[Row]:
    """Send requests and streams to a server of a model at once; then try to delay others."""
    server = Server(model)
    try:
        await server.repeat(server.request, 500, CLIENTS)  # warm up
        server.times.clear()
        before, began = server.memory(), time.perf_counter()
        answers, streamed = await asyncio.gather(
            server.repeat(server.request, requests, CLIENTS),
            server.repeat(server.stream, streams, CONCURRENT_STREAMS),
        )
        seconds, milliseconds = time.perf_counter() - began, sorted(1e3 * t for t in server.times)
        speeds = {
            "answers_per_s": round(requests / seconds),
            "median_ms": round(statistics.median(milliseconds)),
            "p99_ms": round(milliseconds[int(0.99 * len(milliseconds))]),
            "slowest_ms": round(milliseconds[-1]),
            "memory_mb": [before, server.memory()],
        }
        rows = [{"check": "requests", **answers, **speeds}, {"check": "streams", **streamed}]
        return [*rows, await server.flood(), await server.large_lists()]
    finally:
        server.process.terminate()
        server.process.wait(60)


def main() -> int:
    """Run all checks, print and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=4, help="of the run in one process, and of that in two")
    parser.add_argument("--note", default="", help="recorded beside the figures, such as other load of the machine")
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    arguments = parser.parse_args()
    command = shlex.join(["python", *sys.argv])
    results = record("soak", command, "cpu", "float32", 1, copy_bandwidth("cpu"))
    results |= {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "note": arguments.note}
    with tempfile.TemporaryDirectory() as folder:
        for processes in (1, 2):
            progress(f"training in {processes} process(es), with {arguments.kills} kills")
            results["rows"].append(soak_training(Path(folder), processes, arguments.kills))
        progress("serving")
        model = run_folder(Path(folder) / "whole-1") / "merged"
        results["rows"] += asyncio.run(soak_server(model, arguments.requests, arguments.streams))
    progress("")
    for row in results["rows"]:
        print(", ".join(f"{name} {value}" if name != "check" else str(value) for name, value in row.items()))
    write(arguments.out, results)
    return int(any(row.get(name) for row in results["rows"] for name in ("lost", "wrong")))


if __name__ == "__main__":
    sys.exit(main())

"""Damaged and hostile model folders are rejected in one line, in bounded time and memory, or load and predict."""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mrconv import LanguageModel, MRConvNeXt, SequenceClassifier, reparameterize
from mrconv.cli import main
from mrconv.inference import save
from mrconv.tasks.preprocessing import Preprocessor

from ..conftest import randomise

CASES = int(os.environ.get("MRCONV_FUZZ_CASES", 100))
QUICK = 6
MEMORY = 2**31  # bytes by which a case may raise the peak of the process
SECONDS = 20
NUMBERS = [0, -1, 1, 2, 7, 10**5, 10**6, 10**9, 10**18, 10**400, 0.5, 1e9, 1e308, float("inf"), float("nan")]
VALUES = [*NUMBERS, None, True, "", "x", "triton", "reference", "sparse", "s4", [], [1], [10**9, 10**9], {}, {"a": 1}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of small models: a classifier of text, merged and not, sparse, an image model, a language model."""
    root, text = tmp_path_factory.mktemp("models"), tuple("<>abcde")
    options = {"vocab_size": 7, "d_model": 8, "depth": 2, "l_max": 64, "kernel_size": 4}
    tokens = Preprocessor("text", 64, ("no", "yes"), text)
    stages = {"depths": (1, 1), "dims": (4, 8), "kernel_sizes": (4, 2), "patch_size": 2, "image_size": 16}
    torch.manual_seed(0)
    models = {
        "classifier": (SequenceClassifier(n_classes=2, **options), tokens),
        "merged": (reparameterize(SequenceClassifier(n_classes=2, **options)), tokens),
        "sparse": (reparameterize(SequenceClassifier(n_classes=2, kernel="sparse", **options)), tokens),
        "s4": (SequenceClassifier(n_classes=2, mixer="s4", **options), tokens),
        "image": (MRConvNeXt(n_classes=2, **stages), None),
        "language": (LanguageModel(**options), Preprocessor("text", 64, (), text)),
    }
    for name, (model, preprocessor) in models.items():
        save(randomise(model).eval(), root / name, preprocessor)
    return root


def mutate_json(path, draw):
    """Change, remove or add values of a JSON object, or its text."""
    content = json.loads(path.read_text())
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        kind, keys = draw.random(), list(content)
        if kind < 0.75 and keys:
            content[draw.choice(keys)] = draw.choice(VALUES)
        elif kind < 0.85 and keys:
            del content[draw.choice(keys)]
        elif kind < 0.9:
            content[draw.choice(("extra", "plugins", "device", "auto_map"))] = draw.choice(VALUES)
        else:
            path.write_bytes(mutated_bytes(json.dumps(content).encode(), draw))
            return
    if draw.random() < 0.05:
        path.write_text('{"a":' * 100_000)
    else:
        path.write_text(json.dumps(content if draw.random() < 0.95 else draw.choice(([], 1, None, [content]))))


def mutated_bytes(content, draw):
    """Cut bytes, flip some, or insert some."""
    at = draw.randrange(len(content))
    kind = draw.randrange(4)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + draw.randbytes(draw.choice((1, 8, 100))) + content[at:]
    if kind == 2:
        return content[:at] + content[at + draw.choice((1, 8, 100)) :]
    changed = bytearray(content)
    for _ in range(draw.choice((1, 3, 30))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def mutate_weights(path, draw):
    """Change shapes, dtypes or names in the header, the numbers, or any bytes of a safetensors file."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    name = draw.choice([each for each in header if each != "__metadata__"])
    kind = draw.randrange(7)
    if kind == 0:
        path.write_bytes(mutated_bytes(content, draw))
        return
    if kind == 1:
        header[name]["shape"] = draw.choice(([], [0], header[name]["shape"][::-1], [10**9, 10**9], [-1]))
    elif kind == 2:
        header[name]["dtype"] = draw.choice(("F64", "I32", "F8_E4M3", "BOOL", "C64", "I64", "x"))
    elif kind == 3:
        header[draw.choice(("extra", name + ".a", ""))] = header.pop(name)
    elif kind == 4:
        header["__metadata__"] = {"results": draw.choice(("", "[]", "{", '{"accuracy": 1}', "[" * 100_000))}
    elif kind == 5:
        at, number = draw.randrange(len(data) - 8), draw.choice((float("nan"), float("inf"), 1e38, -1e38))
        data = data[: at - at % 4] + struct.pack("<f", number) * 2 + data[at - at % 4 + 8 :]
    else:
        size = draw.choice((0, 2**20, 2**62, 2**64 - 1))
        path.write_bytes(struct.pack("<Q", size) + content[8:])
        return
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


MUTATIONS = {"config.json": mutate_json, "inputs.json": mutate_json, "model.safetensors": mutate_weights}


def run(*arguments):
    """Run a command in a thread, within a time; return its exit code and what it wrote to stderr."""
    errors = io.StringIO()

    def command():
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            try:
                return main([str(argument) for argument in arguments])
            except SystemExit as stop:
                return stop.code

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(command).result(SECONDS), errors.getvalue()


def check(folder, name):
    """Inspect and use a model: each command succeeds, or prints one line and exits with code 2."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    commands = [["info", folder]]
    if name == "language":
        commands.append(["generate", folder, "--prompt", "ab", "--tokens", "2"])
    elif name != "image":
        commands.append(["predict", folder, "--text", "abba", "--device", "cpu"])
    for command in commands:
        code, errors = run(*command)
        assert code in (0, 2), errors
        if code == 2:
            lines = errors.strip().splitlines()
            assert len([line for line in lines if "error: " in line]) == 1, errors
            assert len(lines[-1]) < 2000
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak - before < MEMORY, f"{(peak - before) / 2**30:.1f} GB"


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=() if i < QUICK else pytest.mark.slow) for i in range(max(CASES, QUICK))]
)
@pytest.mark.filterwarnings("ignore")
def test_a_mutated_model_folder_loads_or_is_rejected_in_one_line(folders, tmp_path, seed):
    draw = random.Random(seed)
    name = draw.choice(sorted(path.name for path in folders.iterdir()))
    folder = Path(shutil.copytree(folders / name, tmp_path / name))
    files = [file for file in sorted(MUTATIONS) if (folder / file).exists()]
    for file in draw.sample(files, draw.choice((1, 1, 1, 2))):
        MUTATIONS[file](folder / file, draw)
    check(folder, name)

"""Checks of an installed wheel, run by `make dist` with the Python of an otherwise empty environment.

`installed_package.py` checks an installation without extras, `installed_package.py train` one with the extras train and
serve. Both run in a temporary folder, where nothing of the clone can be imported.
"""

import os
import subprocess
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

import torch

import mrconv

SMALL = ["task.train_size=200", "task.val_size=50", "task.test_size=50", "epochs=1", "accelerator=cpu", "name=small"]


def command(*words: str, code: int = 0) -> str:
    """Run an `mrconv` command, check its exit code, and return what it prints."""
    script = Path(sys.executable).with_name("mrconv")
    done = subprocess.run([script, *words], capture_output=True, text=True)
    assert done.returncode == code, f"mrconv {' '.join(words)}: exit code {done.returncode}\n{done.stderr}"
    return done.stdout + done.stderr


def check_without_extras() -> None:
    """Check the import, a layer, files that are not Python, and the message about a missing extra."""
    assert Path(sys.prefix) in Path(mrconv.__file__).parents, mrconv.__file__
    assert metadata.version("mrconv") == mrconv.__version__
    layer = mrconv.MRConv(d_model=4, l_max=64).eval()
    u = torch.randn(2, 64, 4)
    y = layer(u)
    torch.testing.assert_close(mrconv.reparameterize(layer)(u), y)
    for name in ("py.typed", "ops/costs.json", "configs/train.yaml", "configs/experiment/demo.yaml", "serve/page.js"):
        assert resources.files("mrconv").joinpath(name).is_file(), name
    assert command("--version") == f"mrconv {mrconv.__version__}\n"
    assert "parameters" in command("info", "mrconvnext_tiny_fourier")
    assert "install mrconv with its extra 'train'" in command("train", "--list", code=2)


def check_with_extras() -> None:
    """Train, evaluate and predict with a preset of the wheel, and build the server."""
    assert "demo" in command("train", "--list")
    command("train", "experiment=demo", *SMALL)
    assert "test" in command("evaluate", "runs/small-seed0")
    assert "%" in command("predict", "runs/small-seed0", "--text", "[MAX 2 9 ]")
    from mrconv.inference import load
    from mrconv.serve import Options, create_app

    create_app(load("runs/small-seed0"), Options())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        check_with_extras() if sys.argv[1:] == ["train"] else check_without_extras()
    print(f"mrconv {mrconv.__version__} in {sys.prefix}: passed")

"""The files that `make dist` builds: valid metadata, and every file of the package in the wheel."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_passes_twine(tmp_path):
    copy, out = tmp_path / "copy", tmp_path / "dist"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(["build", "--no-isolation", "--outdir", str(out), str(copy)])
    files = sorted(map(str, out.iterdir()))
    assert [Path(file).suffixes[-1] for file in files] == [".whl", ".gz"]
    run(["twine", "check", "--strict", *files])
    source = {
        path.relative_to(copy / "src").as_posix()
        for path in (copy / "src/mrconv").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    with zipfile.ZipFile(files[0]) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == source


def run(command):
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_installs_a_name_that_is_not_on_pypi():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]
    assert [file for file in files if re.search(r"pip\s+install\s+'?mrconv\b", file.read_text())] == []

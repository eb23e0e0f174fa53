"""Print constraints for pip: the lowest version of every dependency that pyproject.toml allows, except torch's."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = [line for lines in project["optional-dependencies"].values() for line in lines]
lowest = {
    match.groups() for line in project["dependencies"] + extras if (match := re.match(r"([\w-]+).*?>=([\d.]+)", line))
}
print("\n".join(sorted(f"{name}=={version}" for name, version in lowest if name not in ("torch", "setuptools"))))

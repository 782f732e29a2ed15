"""Prints what rapid[EXTRAS] needs, one requirement a line: `python requirements.py pyproject.toml cpu,serve`.

The images install this before the code is copied, so a change of code does not fetch torch again.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
print("\n".join(project["dependencies"] + [line for extra in sys.argv[2].split(",") for line in extras[extra]]))

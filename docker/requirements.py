"""Prints what Quire and the named extras need, for a layer of an image that its code does not change.

python3 docker/requirements.py pyproject.toml server > requirements.txt
"""

import sys
from pathlib import Path

import tomllib

with Path(sys.argv[1]).open("rb") as file:
    project = tomllib.load(file)["project"]
for extra in ("", *sys.argv[2:]):
    print(*(project["optional-dependencies"][extra] if extra else project["dependencies"]), sep="\n")

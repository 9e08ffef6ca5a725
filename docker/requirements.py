"""Prints what packages need with the named extras, for a layer of an image that their code does not change.

python3 docker/requirements.py pyproject.toml:server client/pyproject.toml:openai > requirements.txt
"""

import sys
from pathlib import Path

import tomllib

for argument in sys.argv[1:]:
    file, extras = argument.split(":")
    project = tomllib.loads(Path(file).read_text("utf-8"))["project"]
    print(*project["dependencies"], sep="\n")
    for extra in extras.split(","):
        print(*project["optional-dependencies"][extra], sep="\n")

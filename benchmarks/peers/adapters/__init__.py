"""One program per engine, each run with the interpreter of that engine's venv."""

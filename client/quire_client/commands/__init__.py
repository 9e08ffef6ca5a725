"""Commands of `quire-client`, each in the file of its name; files with an underscore serve several."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

"""Reads checkpoints: `info` reads the configuration, without torch; `load` makes models with the weights."""

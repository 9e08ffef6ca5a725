"""Reads checkpoints: `info` their configuration and files, without torch, and `load` their weights."""

"""Building blocks of models, and the parts of a checkpoint's configuration that they need.

A layer's `weights` tell which checkpoint tensor fills which of its weights.
"""

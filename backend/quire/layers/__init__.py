"""Building blocks of models, and what a checkpoint's configuration says of them.

A layer says which checkpoint tensor fills which of its weights (`weights`).
"""

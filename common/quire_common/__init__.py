"""Basics of all packages but the client, such as files of checkpoints, logs, errors, caches, the machine.

Nothing here imports another package of ours. `machine`, `cache` and `errors` import neither torch nor numpy.
"""

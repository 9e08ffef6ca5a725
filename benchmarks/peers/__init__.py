"""The same work for Quire and for other engines on one machine: `python -m benchmarks.peers`."""

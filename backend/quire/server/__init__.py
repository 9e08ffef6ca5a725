"""`quire serve` and what is around a tritonserver: its process, files, ports and health."""

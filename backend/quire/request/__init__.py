"""The parts of a request that a client can set, and their validation."""

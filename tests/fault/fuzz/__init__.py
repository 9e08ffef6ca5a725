"""A fuzzer of messages: structure-aware, seeded, bounded.

Message `k` of seed `s` depends on nothing else, so that it can be sent again alone:
`python -m tests.fault.fuzz S K [K ...]`.
"""

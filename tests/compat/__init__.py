"""Whether Quire works on a given tritonserver: `python -m tests.compat grpc://HOST:8001 http://HOST:8000`.

Every check asks as a client would, so the server may be anywhere. None needs pytest.
"""

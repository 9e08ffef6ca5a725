"""`quire serve`, which runs a tritonserver and, if asked for, the OpenAI gateway in front of it; and `quire
healthcheck`."""

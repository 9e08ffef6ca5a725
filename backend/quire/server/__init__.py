"""`quire serve`, which runs a tritonserver and the gateway in front of it, with their files and ports; and
`quire healthcheck`."""

"""Loads the plugins of the tests; being here also puts the root on sys.path (`import tests.fixtures`)."""

pytest_plugins = ["tests.failures", "tests.groups", "tests.rows", "tests.slow", "tests.fixtures.server"]

"""Tests of Quire; `tests.fixtures` and `tests.rows` are imported from here."""

"""Measurements of a served Quire; README.md says how to read them."""

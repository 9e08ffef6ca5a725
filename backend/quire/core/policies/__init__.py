"""Policies that the scheduler consults: pure Python, without locks; callers pass the time in."""

"""Small policy objects around the scheduler's one rule: pure Python, no locks, the clock passed in."""

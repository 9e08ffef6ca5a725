"""Small policy objects around the scheduler's one rule: pure Python, no locks, the clock passed in.

queue         who is next; who may take whose place
tenants       weights, quotas and caps of tenants
reservation   whether a request's memory is there
admission     whether a request is taken at all; deadlines
preemption    how a request is preempted: recompute or swap
"""

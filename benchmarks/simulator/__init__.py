"""The real scheduler and block manager on a virtual clock, with a cost model in place of a model.

workload.py makes or reads arrivals, fit.py makes a cost model of a trace, replay.py makes the calls of a
recorded trace again and compares the batches, plot.py draws traces, __main__.py is their command line. What
`quire plan` needs, too, is in quire/plan: cost.py says how long a step takes, simulate.py runs arrivals and
reports.
"""

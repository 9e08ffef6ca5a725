"""The real scheduler and block manager on a virtual clock, with a cost model in place of a model.

workload.py makes or reads arrivals, cost.py says how long a step takes, simulate.py runs them and reports,
replay.py makes the calls of a recorded trace again and compares the batches, plot.py draws traces and
reports, command.py is their command line.
"""

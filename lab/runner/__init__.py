"""Plan a measurement, run it in a fair order, watch the machine, and record every run.

In: settings. Out: records, each written to the results file as soon as its run ends. A plan is
checked before the first run; the machine is described once and watched during every run. Open
`session.py` first: it is the main loop.
"""

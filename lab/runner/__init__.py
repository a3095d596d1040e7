"""What is measured, in which order, watched and kept how.

In: settings. Out: records, each in the results file the moment its run ends. A plan is checked before anything is
measured; the machine is described once and watched during every run. Open `session.py` first: it is the main loop.
"""

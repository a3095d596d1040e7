"""The application: the list of features, the one loop of the commands, options and experiments.

In: a command line. Out: text or JSON on stdout, progress and notes on stderr, an exit status.
`lab/main.py` makes the command line of the listed commands.
"""

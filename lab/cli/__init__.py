"""The command line: parse, call, print.

In: a command line. Out: text or JSON on stdout, progress and notes on stderr, an exit status. A command
computes nothing itself. `lab/main.py` makes the command line of them.
"""

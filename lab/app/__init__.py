"""What commands share: options, help, the one loop that measures, and how a command ends.

In: a command line. Out: text or JSON on stdout, progress and notes on stderr, an exit status.
`lab/main.py` makes the command line from the list of features. Open `running.py` first.
"""

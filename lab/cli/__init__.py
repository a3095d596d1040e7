"""The command line: parse, call, print.

In: the words that a user typed. Out: text or JSON on stdout, progress and notes on stderr, an exit status. A command
computes nothing itself. Open `main.py` first: it names all commands.
"""

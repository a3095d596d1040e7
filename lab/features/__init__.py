"""The list of kinds of results, and what is made of the whole list: tables, JSON, pictures, pages, commands.

It may import everything below `cli`. Only `cli` imports it. Open `known.py` first.
"""

"""Results as sections of text and pictures.

In: records, and what `analysis` and `why` made of them. Out: tables and sentences (`text_*.py`, through `console.py`),
pictures (`plot_*.py`), an HTML page made of sections (`page.py`). Rich and jinja2 are used here.
Open `section.py` first.
"""

"""Results as text, pictures, pages and lessons.

In: records, and what `analysis` and `why` made of them. Out: tables and sentences (`text_*.py`, through `console.py`),
PNG and SVG files (`plot_*.py`), an HTML page (`page.py`), notebooks (`lesson.py`). Rich and jinja2 are used here only.
Open `text_results.py` first: it is what `lab show` prints.
"""

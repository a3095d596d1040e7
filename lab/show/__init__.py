"""Results as text, pictures, pages and lessons.

In: records, and what `analysis` and `why` made of them. Out: tables and sentences, PNG and SVG files, an HTML page.
Rich, matplotlib and jinja2 are used here only. Open `text_results.py` first: it is what `lab show` prints.
"""

"""Results as sections of text and pictures.

In: records. Out: tables, sentences, pictures and an HTML page. Open `table.py` first (records as
rows), then `section.py`. Rich and jinja2 are used here.
"""

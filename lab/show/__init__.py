"""Results as sections of text and pictures: records in; tables, sentences, pictures and an HTML
page out.

Open `section.py` first. Rich and jinja2 are used here.
"""

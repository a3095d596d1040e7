"""The features: a file or folder each, which imports the base and no other feature.

`lab/feature_list.py` lists them. Open `stall.py` first: an experiment in a single file.
"""

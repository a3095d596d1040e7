"""The data and its arithmetic.

Records (a run is a list of steps), results files, the phases of a run, the cost of a step, and
statistics. No llama.cpp, and no files except results files. Open `record.py` first.
"""

"""The data and its arithmetic.

Records (a run is a list of steps), results files, the phases of a run, what a step costs, and statistics. No
llama.cpp, and no reading or writing but of results files. Open `record.py` first.
"""

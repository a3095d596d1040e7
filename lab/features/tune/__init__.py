"""The fastest settings for a workload, confirmed by new runs: `lab tune`.

Open `measuring.py` first.
"""

"""What limited each phase of runs, and what would help: `lab explain`.

The arithmetic is in lab/roofline. Open `section.py` first.
"""

"""Why a run took as long as it did, and how fast it could be.

In: records, and the ceilings of the machine that made them (the best rates of its kernels). Out: the time of every
phase beside its ceiling and its limit, settings that would be faster, and predictions for other lengths, models and
devices. Open `roofline.py` first.
"""

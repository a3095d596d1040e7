"""How fast a model would be, here and on other devices: `lab predict`.

The arithmetic is in lab/roofline. Open `prediction.py` first.
"""

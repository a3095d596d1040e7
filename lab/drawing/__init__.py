"""What all pictures share: colours, axes, points of runs, titles, legends, and writing files. Matplotlib is loaded when
something is drawn.
"""

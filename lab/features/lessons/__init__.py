"""What the notebooks use besides the public functions. Open `lesson.py` first."""

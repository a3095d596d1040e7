"""What the notebooks use besides the public functions."""

"""What limits a run, and the machine's ceilings: ceilings, explain."""

"""What this machine is, whether llama.cpp runs here, and what slows it down: `lab doctor`.

Open `checkup.py` first.
"""

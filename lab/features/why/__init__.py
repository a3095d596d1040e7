"""Why two speeds differ: their ratio as a product of causes: `lab why`. Open `asking.py` first."""

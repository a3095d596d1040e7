"""Results as one HTML page: `lab report`. Open `page.py` first."""

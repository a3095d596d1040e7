"""`lab report`: results as one HTML page. Open `page.py` first."""

"""What a quantization costs in quality and gains in speed on this machine: `lab quant`.

Open `measuring.py` first.
"""

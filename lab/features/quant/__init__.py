"""What a quantization costs in quality, and what it buys in speed, on this machine."""

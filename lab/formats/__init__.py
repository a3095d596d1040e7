"""Results of other tools, read and written. Open `llama_bench_format.py` first."""

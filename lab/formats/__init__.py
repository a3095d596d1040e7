"""Results of other tools, read and written. Open `llama_bench_rows.py` first."""

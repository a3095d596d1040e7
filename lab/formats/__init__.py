"""Results of other tools, read and written.

In: a file or a pasted text. Out: records; and from records llama-bench's JSON, or a table. Open
`llama_bench_rows.py` first.
"""

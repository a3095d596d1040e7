"""From the name of a model to a file on this machine.

In: a SPEC such as `smollm2-135m:Q8_0`, `hf:OWNER/REPO/FILE.gguf` or a path. Out: a GGUF file,
pulled from the hub, written with random weights, re-quantized, or already here. Open `catalog.py`
first: it defines the forms of a SPEC.
"""

"""The code of the engine's process: llama.cpp and ggml, called through ctypes.

In: requests of the parent. Out: steps with their time stamps, headers of model files, rates of
single kernels. `process/worker.py` starts it by name; otherwise only a feature's `child.py` imports
it. Open `loop.py` first: it is the timed loop.
"""

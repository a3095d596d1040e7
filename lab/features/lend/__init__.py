"""`lab rpc-server`: lend this machine's devices to llama.cpp on another machine."""

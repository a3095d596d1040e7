"""The folder of mini-lab-llama-build.cmake."""

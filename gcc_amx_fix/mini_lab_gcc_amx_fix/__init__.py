"""The folder of mini-lab-gcc-amx-fix.cmake."""

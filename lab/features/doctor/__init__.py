"""`lab doctor`: what is this machine, does llama.cpp run here, and what slows it down?"""

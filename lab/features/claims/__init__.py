"""Textbook claims, each judged on this machine."""

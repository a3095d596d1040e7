"""Prefill and decode of several prompt lengths: measure, sweep."""

"""Hostile input: files and servers that want to hang, fill or take over the lab."""

"""`lab record`: what a client sends to a server, which of its requests break the server's cache,
and what that costs.
"""

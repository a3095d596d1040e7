"""The claims: what one is, the parts of a session that measure for all of them, their verdicts, and the claims."""

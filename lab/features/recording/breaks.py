"""The kinds of breaks of a cache."""

CHANGED = "changed"
INSERTED = "inserted before"
REORDERED = "reordered"
SHORTENED = "shortened"
REMOVED = "removed"
OTHER_CONVERSATION = "other conversation"
CONTEXT_FULL = "context full"
EVICTED = "evicted"

IN_PROMPT = (CHANGED, INSERTED, REORDERED, SHORTENED, REMOVED, CONTEXT_FULL)
"""The prompt differs from the earlier one; with a full context, because the client cut it."""

IN_SERVER = (OTHER_CONVERSATION, CONTEXT_FULL, EVICTED)
"""The prompt only grew, and the server has lost the earlier one."""

KINDS = (*IN_PROMPT, OTHER_CONVERSATION, EVICTED)

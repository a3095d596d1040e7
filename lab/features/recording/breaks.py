"""The kinds of breaks of a cache."""

CHANGED = "changed"
INSERTED = "inserted before"
REORDERED = "reordered"
SHORTENED = "shortened"
REMOVED = "removed"
OTHER_CONVERSATION = "other conversation"
CONTEXT_FULL = "context full"
EVICTED = "evicted"
OTHER_SLOT = "other slot"
UNSEEN_SLOT = "slot not seen"
NO_CHECKPOINT = "no checkpoint"
CONTEXT_SHIFT = "context shift"
CACHE_FULL = "cache memory full"
RESTARTED = "restarted"
NOT_ASKED = "cache_prompt off"

IN_PROMPT = (CHANGED, INSERTED, REORDERED, SHORTENED, REMOVED, CONTEXT_FULL)
"""The prompt differs from the earlier one; with a full context, because the client cut it."""

OF_ENGINE = (OTHER_SLOT, NO_CHECKPOINT, CONTEXT_SHIFT, CACHE_FULL, RESTARTED)
"""Why a llama-server had lost a prompt, as its slots, its properties or its log show."""

IN_SERVER = (OTHER_CONVERSATION, CONTEXT_FULL, EVICTED, UNSEEN_SLOT, *OF_ENGINE)
"""The server has lost the beginning that both prompts share."""

KINDS = {*IN_PROMPT, *IN_SERVER, NOT_ASKED}

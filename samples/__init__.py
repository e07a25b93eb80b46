"""The embedded example: conversations with checkable answers, and a tiny model that cannot answer them yet."""

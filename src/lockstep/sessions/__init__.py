"""Public API for user-written training loops: session, script, scoring."""

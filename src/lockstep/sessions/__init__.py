"""The public API for a loop of the user: the session, its script, scoring."""

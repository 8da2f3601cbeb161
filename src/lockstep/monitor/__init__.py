"""Watching ranks: progress, heartbeats, the watchdog, tracebacks, failures, signals, output."""

"""What watches ranks while they run: progress, heartbeats, the watchdog, tracebacks, failures, signals, output."""

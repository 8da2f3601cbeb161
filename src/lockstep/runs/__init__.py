"""One run: its folder, which it alone holds, and its course from start to summary."""

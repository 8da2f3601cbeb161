"""The ranks as a value: topology, process group, shared memory, random state."""

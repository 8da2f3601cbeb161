"""A run as one file of plain PyTorch."""

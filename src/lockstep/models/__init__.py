"""Networks, by name: ours, torchvision's, and the user's own."""

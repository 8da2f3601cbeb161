"""The networks, which `table` finds by name: ours for small images and for CPUs, torchvision's, and the user's own."""

"""The networks: PyramidNet and ResNet for small images, small nets for CPUs, torchvision's, and the user's own.

`table` finds a network by its name. Nothing here imports torch before a network is built, so that
`lockstep --help` answers at once.
"""

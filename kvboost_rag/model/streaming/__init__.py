"""Models bigger than the card: layers that do not fit stay in host memory and pass through fixed slots on the GPU."""

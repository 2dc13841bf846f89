"""Where tensors live: named axes of a mesh of devices, and which axis of a tensor is split along which of them."""

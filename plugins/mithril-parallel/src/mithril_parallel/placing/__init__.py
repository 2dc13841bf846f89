"""Which axis of each tensor is split along which axis of a mesh, and the exchanges that follow."""

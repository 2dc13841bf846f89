"""Sharding strategies: which mesh axis splits which tensor axis, and the collectives that this implies."""

"""Backends: the base class, memory plans, and code generation for backends that generate Python source."""

"""The OpenCL backend of mithril."""

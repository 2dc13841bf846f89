"""The C backend of mithril: machine code scheduled with TVM, and readable C that runs without Python."""

"""The compiler: from a model to an executable program, in seven steps."""

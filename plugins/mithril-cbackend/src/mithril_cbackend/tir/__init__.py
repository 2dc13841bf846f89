"""TIR expressions and statements that kernels are written with."""

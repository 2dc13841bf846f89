"""``ml.from_jax``: functions of JAX as models, through their jaxprs and one function per primitive."""

"""Products of narrow elements, several of which form a 32-bit int8x4 group: bfloat16, 8-bit and 4-bit integers."""

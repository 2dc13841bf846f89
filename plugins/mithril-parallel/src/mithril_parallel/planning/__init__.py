"""What a program will need and take on hardware that need not be here, before any compiler has run."""

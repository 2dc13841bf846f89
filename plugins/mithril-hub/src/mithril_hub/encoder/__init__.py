"""Encoders of text, images and sound, and models of an encoder and a decoder."""

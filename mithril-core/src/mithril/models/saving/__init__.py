"""Models as dictionaries and JSON: the structure without the numbers; reading runs no code of the file."""

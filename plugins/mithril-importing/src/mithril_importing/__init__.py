"""A kit for importers: tables of operators, names, sizes, folding, declared types, and layers by module paths."""

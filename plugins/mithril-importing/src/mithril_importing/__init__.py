"""A kit for importers: the layers of an imported model, by the module paths of its source."""

"""Export of a compiled model as a folder of a web site, which is a package of npm as well."""

"""Pictures of graphs that need no program outside Python: layered layout, SVG, collapsible HTML."""

"""Direct alignment: items, objectives, losses."""

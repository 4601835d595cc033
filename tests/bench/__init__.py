"""How fast the loop is, as ratios of two measurements of one run."""

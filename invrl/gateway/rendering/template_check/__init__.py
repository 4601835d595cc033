"""`invrl check-template`: the check of a chat template, and its conversations."""

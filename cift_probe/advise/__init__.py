"""Whether a plan fits on a card, by which tier, and what would change the answer."""

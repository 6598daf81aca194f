"""Results and progress, for people and as JSON documents. It turns values into text; it decides nothing."""

"""The reported claims, one judge for each, and the scorecard of their verdicts."""

"""A roofline model of a decode step: fitted, checked against what was measured, used to predict."""

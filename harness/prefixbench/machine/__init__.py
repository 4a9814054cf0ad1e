"""The machine under the measurement: what it is, how fast it ran, who holds it."""

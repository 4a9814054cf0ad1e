"""Jobs: from a configuration to launches, measurements and a record for every point, failed ones included."""

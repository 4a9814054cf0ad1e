"""Attention kernels of one decode step, ours and the peers', on the same inputs, in the same process, by one clock."""

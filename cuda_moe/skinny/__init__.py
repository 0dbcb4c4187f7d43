"""One-launch GEMMs for at most 16 rows of x: the plan, its kernels and their dispatch."""

"""Training: the loop, and what it needs besides the model: gradients, optimizer, processes, records, signals."""

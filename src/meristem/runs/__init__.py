"""The folder of a run: its files, its lock, its logs, its checkpoints, and what binds them to each other."""
